"""What a Kernel is: one way to compute an operation, ours or a peer's, with what it promises to launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.problem import AttentionProblem, Problem

if TYPE_CHECKING:
    import torch

Origin = Literal["ours", "peer", "candidate"]
Device = Gpu | None  # None: the CPU
AnyProblem = Any  # of the operation that the kernel computes: it is asked only after supports() said None


class CannotServe(ValueError):
    """A kernel cannot serve these very tensors (their strides or alignment, say), though it serves such a problem."""


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
    """One kernel launch that a Kernel promises. None means that nothing is promised of that field (a peer's grid, say).

    ``name`` is a regular expression that the launched kernel's whole name must contain.
    """

    name: str
    grid: tuple[int, int, int] | None = None
    threads: int | None = None
    shared_bytes: int | None = None
    cluster: tuple[int, int, int] | None = None  # held where it can be read (see measure/clusters.py)
    registers: int | None = None  # a thread's


@dataclass(frozen=True, slots=True)
class CompileJob:
    """All that a compiler needs to build one kernel for a GPU that is not here (see hardware/target.py).

    ``signature`` maps argument names to Triton types ("*bf16", "i32", "fp32", "constexpr", "tensordesc<...>"),
    ``constexprs`` maps argument names to values, ``divisible_by_16`` names the arguments known to be so.
    """

    function: Any  # triton.JITFunction or gluon's; typed Any to keep triton out of this module
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int
    threads: int  # a block's, with the warps that warp specialisation adds
    maxnreg: int | None = None
    gluon: bool = False


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of one AttentionProblem, as [batch, heads, seqlen, head_dim] views of any strides with a contiguous
    last dimension. ``out``, where given, is written in place of a new tensor; ``return_lse`` asks for the log-sum-exp."""

    problem: AttentionProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    return_lse: bool = False
    out: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """``out`` is [batch, heads, seqlen_q, head_dim_v] in the input dtype; ``lse`` is [batch, heads, seqlen_q] fp32,
    natural log, -inf for a row that sees no key, or None where it was not asked for (or a peer does not give it)."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


# Writes ``out`` (and ``lse`` where it is not None) for tensors of exactly the shapes, strides, dtype, device and 16-byte
# alignment that it was planned for: (q, k, v, out, lse, softmax_scale). It checks nothing: it is the short path to the launch.
Launcher = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None", float], None]


def attention_only(supports: Callable[[AttentionProblem, Device], str | None]) -> Callable[[Problem, Device], str | None]:
    """A ``supports`` that refuses, in words, whatever is not attention."""

    @functools.wraps(supports)
    def of_any(problem: Problem, device: Device) -> str | None:
        if not isinstance(problem, AttentionProblem):
            return f"it computes attention, not {problem.op}"
        return supports(problem, device)

    return of_any


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation. Every field is a plain function, so that a kernel file reads top to bottom.

    supports(problem, device): None if it can serve the problem there, else the reason in words, for a user to read.
    suits(problem, gpu): whether it is a good guess for a problem that no record is near to.
    configs(problem, device): the configs worth trying, the best guess first; never empty where supports() is None.
    run(inputs, config): compute. Raises whatever the launch raises; never falls back to anything else.
    plan(inputs, config): compile if need be and return the Launcher for such inputs, whose ``out`` must be given (its strides
        are part of the plan); ours only. Raises CannotServe.
    launches(problem, config, gpu): the promise that the call-path check holds it to.
    compile_job(problem, config, gpu): how to build it without a GPU; None for peers.
    absent(): None if it can be imported here, else why not (a peer that is not installed).
    """

    name: str
    origin: Origin
    op: str
    about: str  # one line for people
    supports: Callable[[Problem, Device], str | None]
    configs: Callable[[AnyProblem, Device], tuple[Config, ...]]
    run: Callable[[AttentionInputs, Config], AttentionOutput]
    launches: Callable[[AnyProblem, Config, Gpu], tuple[Launch, ...]]
    plan: Callable[[AttentionInputs, Config], Launcher] | None = None
    compile_job: Callable[[AnyProblem, Config, Gpu], CompileJob] | None = None
    suits: Callable[[AnyProblem, Gpu], bool] = field(default=lambda problem, gpu: True)
    interpretable: bool = False  # runs under TRITON_INTERPRET=1
    absent: Callable[[], str | None] = field(default=lambda: None)
