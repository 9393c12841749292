"""Kernel: one way to compute an operation, ours or a peer's, with the launches that it promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.problem import Problem

Origin = Literal["ours", "peer", "candidate"]
Device = Gpu | None  # None: the CPU

P = TypeVar("P", bound=Problem)
I = TypeVar("I")  # noqa: E741  # the tensors of one call, in the operation's own type
O = TypeVar("O")  # noqa: E741  # what a call returns
# Launches on tensors like those that it was planned for, without checks. Its arguments are the operation's own tensors, in the
# operation's own order.
Launcher = Any


class CannotServe(ValueError):
    """A kernel cannot serve these tensors (strides, alignment), though it serves such a problem."""


class Config(Mapping[str, int]):
    """The named integers that a kernel is built with, such as ``block_m=64 num_warps=4``. Hashable, with a text form."""

    __slots__ = ("_items",)

    def __init__(self, **values: int) -> None:
        self._items = dict(values)

    def __getitem__(self, name: str) -> int:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._items.items())

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value}' for name, value in self._items.items())})"

    @classmethod
    def parse(cls, text: str) -> Config:
        """Read what ``str`` wrote.

        Raises:
            ValueError: a word is not ``name=integer``.
        """
        values: dict[str, int] = {}
        for word in text.split():
            name, equals, number = word.partition("=")
            if not equals or not name.isidentifier() or not number.lstrip("-").isdigit():
                raise ValueError(f"config word {word!r} is not name=integer")
            values[name] = int(number)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch that a Kernel promises. None: the field is not promised (such as a peer's grid).

    ``name`` is a regular expression that the launched kernel's whole name must contain.
    """

    name: str
    grid: tuple[int, int, int] | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    cluster: tuple[int, int, int] | None = None  # checked where the profiler reports it
    registers: int | None = None  # a thread's


@dataclass(frozen=True, slots=True)
class CompileJob:
    """What Triton is given to compile one kernel: here for a launch, or for a GPU that is not here (hardware/target.py).

    ``arguments`` are all of the function's parameters in order. One with a dtype and an address stands for a tensor.
    """

    function: Any  # triton.JITFunction or gluon's; typed Any to keep triton out of this module
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]  # num_warps and the like


@dataclass(frozen=True)  # no slots: in Python 3.11 a generic class with both cannot be made by its alias
class Kernel(Generic[P, I, O]):
    """One implementation of an operation. Every field is a plain function, so that a kernel file reads top to bottom.

    supports(problem, device): None if it can serve the problem there, else the reason in words, for a user to read.
    suits(problem, gpu): whether it is a good guess for a problem without a near record.
    configs(problem, device): the configs worth trying, the best guess first; never empty where supports() is None.
    exact(problem, config, gpu): the config of a launch at a problem's very lengths, where ``config`` leaves tiles to each call.
    run(inputs, config): compute. Raises whatever the launch raises; never falls back to anything else.
    load(problem, inputs): the inputs by name as ``run`` takes them, with new tensors for those that are prepared once, when a
        model is loaded (repacked or dequantised weights); None for a kernel that takes a checkpoint's. It is not timed. A
        kernel keeps nothing of it by tensor: values also change without a new version.
    plan(inputs, config): compile if need be and return the Launcher for inputs like these; None for a kernel that prepares
        nothing. Raises CannotServe.
    workspace(problem, config): the most bytes of device memory that one call takes beyond its results.
    launches(problem, config, gpu): the launches that it promises; the call-path check compares them.
    absent(): None if it can be imported here, else why not (a peer that is not installed).
    on_disk: the environment variable that, set to 1, makes a peer keep what it compiles or tunes.
    """

    name: str
    origin: Origin
    op: str
    about: str  # one line for people
    supports: Callable[[P, Device], str | None]
    configs: Callable[[P, Device], tuple[Config, ...]]
    run: Callable[[I, Config], O]
    launches: Callable[[P, Config, Gpu], tuple[Launch, ...]]
    plan: Callable[[I, Config], Launcher] | None = None
    load: Callable[[P, Mapping[str, Any]], dict[str, Any]] | None = None
    workspace: Callable[[P, Config], int] = field(default=lambda problem, config: 0)
    suits: Callable[[P, Gpu], bool] = field(default=lambda problem, gpu: True)
    exact: Callable[[P, Config, Gpu], Config] = field(default=lambda problem, config, gpu: config)
    interpretable: bool = False  # runs under TRITON_INTERPRET=1
    slow: bool = False  # a peer that is measured only when asked for: the plain maths, a slower mode, minutes of compilation
    on_cpu: bool = False  # a peer that is worth timing on a CPU
    absent: Callable[[], str | None] = field(default=lambda: None)
    on_disk: str = ""
    # Whether an automatic choice takes a peer that records show faster; "if allowed": if FLASHMOE_PEERS is 1.
    replaces_ours: Literal["never", "if allowed", "always"] = "never"

    def cannot(self, problem: Problem, device: Device) -> str | None:
        """Why it cannot serve a problem of any operation, in words; None if it can."""
        if problem.op != self.op:
            return f"it computes {self.op}, not {problem.op}"
        return self.supports(problem, device)  # type: ignore[arg-type]  # of its own operation, as was just seen


AnyKernel = Kernel[Any, Any, Any]
