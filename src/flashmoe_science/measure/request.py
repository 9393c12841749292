"""What a run measures: a caller's words as suites, problems and kernels, or an error in one line; and the implementations that
it times: kernels of the package, peers, and users' functions."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.kernel import AnyKernel, Config, Device, Launch
from flashmoe_science.measure.worker.callers import PLAIN
from flashmoe_science.measure.worker.loading import parse_spec
from flashmoe_science.operations import OPERATIONS, first_words, is_operation, kernel_named, operation, parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import Origin

_MAX_CPU_FLOPS, _MAX_CPU_BYTES = 2e10, 6e8  # of a problem that a CPU core does in seconds
_MAX_SEED = 2**63 - 1 - 10**9  # torch's generators take 64 bits, and cases add to the seed
_MAX_WATCHDOG_S = 24 * 3600.0
_MAX_DRAW = 1000
_CONFIGS = 4  # of a kernel that are tried, if nothing else is asked
ALL = "all"  # peers, of --against


@dataclass(frozen=True, slots=True)
class Request:
    """What ``flashmoe prove`` was asked for. Raises ValueError, in one line: an option is out of range, or excludes another.

    ``targets`` are suites, problems' texts and functions, in any mixture. ``draw``: problems drawn at random around each suite
    that is named, in place of the suite. ``shard``: (1, 4) keeps the first of four parts. ``price`` is USD for an hour of the
    machine. ``tunes``: a quick run that tries as many configs as any other.
    """

    targets: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    quick: bool = False
    full: bool = False
    draw: int | None = None
    shard: tuple[int, int] | None = None
    seed: int = 42
    watchdog_s: float = 60.0
    budget_s: float | None = None
    price: float | None = None
    command: tuple[str, ...] = ()
    tunes: bool = False

    def __post_init__(self) -> None:
        if self.quick and self.full:
            raise ValueError("--quick and --full are both given; give one or the other")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"--seed is {self.seed}; it must be from 0 to {_MAX_SEED}")
        if not 0 < self.watchdog_s <= _MAX_WATCHDOG_S:  # NaN and infinity are refused here too
            raise ValueError(
                f"--watchdog is {self.watchdog_s:g}; it must be more than 0 and at most {_MAX_WATCHDOG_S:g} seconds"
            )
        if self.draw is not None and not 1 <= self.draw <= _MAX_DRAW:
            raise ValueError(f"--draw is {self.draw}; it must be from 1 to {_MAX_DRAW} problems")
        if self.functions and self.kernel:
            raise ValueError("--kernel names a kernel of the package beside a function; name it with --against")
        for word in self.against:
            if ":" in word:
                parse_spec(word)

    @property
    def functions(self) -> tuple[str, ...]:
        """The words that name functions: those with a colon that are no problem's text. None twice. Raises ValueError: one that
        names no function, or a file that is not there."""
        found = [word for word in self.targets if ":" in word and not set(word.split()[:1]) & set(first_words())]
        return tuple(dict.fromkeys(parse_spec(word).text for word in found))

    @property
    def configs(self) -> int:
        """The number of configs of a kernel of ours that are tried."""
        return 1 if self.quick and not self.tunes else sys.maxsize if self.full else _CONFIGS

    @property
    def repeats(self) -> int:
        """The number of calls that are compared bit by bit."""
        return 3 if self.quick else 10

    @property
    def as_dispatched(self) -> bool:
        """Whether of our kernels only the automatic choice is measured, which on drawn problems is what a user gets."""
        return self.draw is not None and not self.kernel


@dataclass(frozen=True, slots=True)
class Group:
    """Problems of one operation that make one run, under the suite's name or "custom"."""

    name: str
    op: str
    problems: tuple[Problem, ...]


def is_too_much_for_a_cpu(problem: Problem) -> bool:
    return problem.flops() > _MAX_CPU_FLOPS or problem.min_bytes() > _MAX_CPU_BYTES


def groups(request: Request, device: Device) -> tuple[Group, ...]:
    """The groups that are named, by default the suite of each operation for this machine ("quick" on a GPU, "cpu" without one).
    Raises ValueError as ``named_groups`` does, and for a problem that is too much for a CPU where there is no GPU."""
    found = named_groups(request)
    if not found and not request.functions:
        name = "cpu" if device is None else "quick"
        found = [_suite(name, op, texts, request) for suite, (op, texts) in _suites().items() if suite == name]
    part, parts = request.shard or (1, 1)
    ends = [(len(one.problems) * (part - 1) // parts, len(one.problems) * part // parts) for one in found]
    found = [replace(one, problems=one.problems[a:b]) for one, (a, b) in zip(found, ends, strict=True) if a < b]
    if not found and not request.functions:
        raise ValueError(f"--shard is {part}/{parts}, and there are fewer problems than shards; nothing is left to measure")
    for name, problem in ((group.name, problem) for group in found for problem in group.problems):
        if device is None and is_too_much_for_a_cpu(problem):
            what = "problem" if name == "custom" else f"suite {name!r}"
            raise ValueError(f"{what} needs a GPU, and there is none here: {problem} is too much for a CPU")
    return tuple(found)


def _suites() -> dict[str, tuple[str, Sequence[str]]]:
    """Name -> the operation of a suite, and its problems as text."""
    return {name: (op.name, texts) for op in OPERATIONS for name, texts in op.contract().suites().items()}


def distributed_suites() -> dict[str, tuple[str, ...]]:
    """Name -> the problems of a suite on several ranks, as text without their last word."""
    modules = (one.module("proof", "ranks") for one in OPERATIONS if one.parallelism)
    return {name: texts for module in modules for name, texts in module.SUITES.items()}


def named_groups(request: Request) -> list[Group]:
    """A group for each suite that is named, and one for each operation of the problems given as text. Raises ValueError: a word
    that is neither, a problem that does not parse or is of several GPUs."""
    words = [word for word in dict.fromkeys(request.targets) if word not in request.functions]
    suites = _suites()
    if request.draw is not None and not any(word in suites for word in words):
        raise ValueError(f"--draw samples around a suite, and none is named; name one of {', '.join(suites)}")
    found = [_suite(word, *suites[word], request) for word in words if word in suites]
    by_op: dict[str, dict[Problem, None]] = {}
    for word in (word for word in words if word not in suites):
        torchrun = f"start it by torchrun --nproc-per-node {{}} -m flashmoe_science prove {shlex.quote(word)}"
        if word in distributed_suites():
            raise ValueError(f"suite {word!r} is of several GPUs; {torchrun.format(2)}")
        if not set(word.split()[:1]) & set(first_words()):
            first = " or ".join(map(repr, first_words()))
            raise ValueError(f"{word!r} is neither a problem (those begin with {first}) nor a suite ({', '.join(suites)})")
        if (problem := parse_problem(word)).gpus() > 1:
            raise ValueError(f"'{problem}' is of {problem.gpus()} GPUs; {torchrun.format(problem.gpus())}")
        by_op.setdefault(problem.op, {})[problem] = None
    return found + [Group("custom", op, tuple(problems)) for op, problems in by_op.items()]


def _suite(name: str, op: str, texts: Sequence[str], request: Request) -> Group:
    problems = tuple(parse_problem(text) for text in texts)
    if request.draw is None:
        return Group(name, op, problems)
    chance = random.Random(f"{name} {request.seed}")
    drawn: dict[Problem, None] = {}
    contract = operation(op).contract()
    for _ in range(20 * request.draw):
        drawn.setdefault(contract.draw(chance.choice(problems), chance))
        if len(drawn) == request.draw:
            break
    return Group(f"{name}-draw", op, tuple(drawn))


def default_kernel(problem: Problem, device: Device) -> str:
    """The kernel that the library would run on a device. Raises ValueError: the problem is of no operation of the package."""
    if not is_operation(problem.op):
        raise ValueError(f"--kernel is not given, and '{problem}' is of no operation here; name the function to look at")
    op = operation(problem.op)
    return select(problem, device, known_table(), op.ours(), op.fallback()).kernel


@dataclass(frozen=True, slots=True)
class Entry:
    """An implementation that is timed, with a config. ``who`` is its name for a worker, empty for the function that the worker
    has loaded; ``kernel`` is None for what no operation of the package lists."""

    name: str
    who: str
    kernel: AnyKernel | None = None
    config: str = ""
    known_origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.config})" if self.config else self.name

    @property
    def origin(self) -> Origin:
        if self.known_origin is not None:
            return self.known_origin
        if self.kernel is not None:
            return self.kernel.origin
        return "candidate" if ":" in self.name else "peer"

    def cannot(self, problem: Problem, device: Device) -> str | None:
        """Why it does not support a problem, as text; None if it does."""
        if self.kernel is None:
            return None
        return self.kernel.absent() or self.kernel.cannot(problem, device)

    def promised(self, problem: Problem, device: Device) -> tuple[Launch, ...]:
        """The promised launches of its call."""
        if self.kernel is None or device is None:
            return ()
        return self.kernel.launches(problem, Config.parse(self.config), device)

    def workspace(self, problem: Problem) -> int | None:
        """Bytes of device memory that one call may take beyond its results; None where nothing is promised (a peer)."""
        if self.kernel is None or self.kernel.origin != "ours":
            return None
        return self.kernel.workspace(problem, Config.parse(self.config))

    def chosen(self, problem: Problem, device: Device) -> Entry:
        """The entry with the config of the automatic choice."""
        if self.kernel is None:
            return self
        if self.kernel.origin == "ours":
            found = select(problem, device, known_table(), [self.kernel], None, requested=self.kernel).config
        else:
            found = self.kernel.configs(problem, device)[0]
        return replace(self, config=str(found))

    def with_configs(self, problem: Problem, device: Device, request: Request) -> list[Entry]:
        """An entry for each config that a run tries, the automatic choice's first. Of a peer a quick run tries as many as any
        other run: beside a slow config of the peer ours would look faster than it is."""
        if self.kernel is None:
            return [self]
        ours = self.origin == "ours"
        most = request.configs if ours else max(request.configs, _CONFIGS)
        others = () if ours and request.as_dispatched else self.kernel.configs(problem, device)[:most]
        tried = (self.chosen(problem, device), *(replace(self, config=str(config)) for config in others))
        return list(dict.fromkeys(tried))[:most]


def of_kernel(kernel: AnyKernel) -> Entry:
    return Entry(kernel.name, kernel.name, kernel)


def subjects_and_rivals(request: Request, group: Group, device: Device) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The subjects of a run and their rivals. Subjects are the kernels that are named, else all of ours that this machine can
    run, else the framework's own operator, so that there is something to time. Raises ValueError: there is no such kernel, or
    it can serve none of the problems here; no rival is left."""
    op = operation(group.op)
    if not request.kernel:
        supported = [one for one in op.ours() if any(one.cannot(problem, device) is None for problem in group.problems)]
        kernels = supported or [kernel_named(op.fallback(), op.name)]
    else:
        kernels = [kernel_named(name, op.name) for name in dict.fromkeys(request.kernel)]
        for one in kernels:
            reasons = [of_kernel(one).cannot(problem, device) for problem in group.problems]
            if all(reasons):
                raise ValueError(f"kernel {one.name!r} can serve none of the problems here; {group.problems[0]}: {reasons[0]}")
    subjects = tuple(map(of_kernel, kernels))
    return subjects, rivals_of(group.op, (), request, device, subjects)


def rivals_of(op: str, own: Sequence[str], request: Request, device: Device, subjects: Sequence[Entry]) -> tuple[Entry, ...]:
    """What the subjects are compared with: what --against named ("all" is every peer), else the peers that are worth their
    time, with --full the slow ones too; the contract's ``own`` first, and the plain maths where there are none. ``op`` is the
    contract's name. Raises ValueError: an unknown name, a peer that is named and absent here; no rival is left."""
    peers = operation(op).peers() if is_operation(op) else ()
    entries = {name: Entry(name, name) for name in (*own, PLAIN)} | {one.name: of_kernel(one) for one in peers}
    if request.against and ALL not in request.against:
        if is_operation(op) and not entries.keys() >= {*request.against}:  # ours import Triton
            entries = {one.name: of_kernel(one) for one in operation(op).ours()} | entries
        chosen = [_named(name, op, entries) for name in dict.fromkeys(request.against)]
    else:
        if not (request.full or request.against):
            peers = tuple(one for one in peers if (one.on_cpu if device is None else not one.slow))
        chosen = [*(entries[name] for name in own), *map(of_kernel, peers)] or [entries[PLAIN]]
    names = {one.name for one in subjects}
    rivals = tuple(one for one in chosen if one.name not in names)
    if not rivals:
        raise ValueError(f"--against leaves no rival for {', '.join(names)}; name another")
    return rivals


def _named(name: str, op: str, entries: dict[str, Entry]) -> Entry:
    if name not in entries and ":" not in name:
        raise ValueError(f"--against is {name!r}; for {op} it must be one of {', '.join(entries)}, all, or module:function")
    found = entries.get(name, Entry(name, name))
    absent = None if found.kernel is None else found.kernel.absent()
    if absent is not None:
        raise ValueError(f"kernel {name!r} cannot be measured here: {absent}")
    return found
