"""The contract of an operation: how it is called, on what, and what is right; the same for our kernels, peers and yours.

An attention kernel ``fn(q, k, v, causal=False, softmax_scale=None)`` on [B, H, S, D] needs nothing from here. A mixture of
experts says ``@contract("moe")``. An operation of your own is a subclass of ``Contract``::

    import torch
    from flashmoe_science.contract import Contract, contract

    class RowSoftmax(Contract):
        name = "row_softmax"  # the word after "op" in a problem's text

        def default_problems(self):
            return [self.problem("fp32", rows=1024, cols=512), self.problem("fp16", rows=4096, cols=1024)]

        def inputs(self, problem, device, generator):
            shape = (problem["rows"], problem["cols"])
            return {"x": torch.randn(shape, device=device, generator=generator).to(self.dtype(problem))}

        def reference(self, problem, inputs):
            return torch.softmax(inputs["x"], dim=-1)

        def flops(self, problem):
            return 4 * problem["rows"] * problem["cols"]

        def min_bytes(self, problem):
            return 2 * problem["rows"] * problem["cols"] * self.dtype(problem).itemsize

    @contract(RowSoftmax())
    def my_softmax(x):
        ...

    my_softmax.promises = {"kernel": "_softmax_kernel", "threads": 128, "deterministic": True, "speedup": 1.3}

The contract's author decides what is right: read the contract before you believe a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flashmoe_science.operations import OPERATIONS, is_operation, operation
from flashmoe_science.problem import CustomProblem, Dtype, Problem

if TYPE_CHECKING:
    import torch

    from flashmoe_science.kernel import AnyKernel, Config, Device

    Inputs = Mapping[str, torch.Tensor]
    Outputs = torch.Tensor | tuple[torch.Tensor, ...]

DEFAULT = "attention"  # the contract of a function that names none
DISTRIBUTIONS = ("normal", "zeros", "constant", "large", "tiny")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Errors:
    """Maximum, RMS and mean of an absolute error, or a bound on each."""

    max: float
    rms: float
    mean: float

    @classmethod
    def of(cls, difference: torch.Tensor) -> Errors:
        """The errors of a difference, NaN or infinite if an element is; without a temporary of its size."""
        from torch.linalg import vector_norm

        count = difference.numel()
        largest, square, total = (vector_norm(difference, order).item() for order in (math.inf, 2, 1))
        return cls(largest, square / math.sqrt(count), total / count)

    def within(self, bound: Errors) -> bool:
        return self.max <= bound.max and self.rms <= bound.rms and self.mean <= bound.mean

    def least(self, other: Errors) -> Errors:
        return Errors(min(self.max, other.max), min(self.rms, other.rms), min(self.mean, other.mean))


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of a correctly rounded result."""
    import torch

    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True, slots=True)
class Output:
    """One result of a call. A kernel may omit an ``optional`` one."""

    name: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Mistake:
    """A common mistake: its ``code`` for machines, ``words`` that end "it is right for ...", and its results, in fp64 and
    shaped as those of ``Contract.reference``."""

    code: str
    words: str
    outputs: Outputs


class Contract:
    """What an operation is: how it is called, on what, and what is right.

    A subclass gives ``name``, ``default_problems``, ``inputs``, ``reference``, and ``flops`` and ``min_bytes``, from which
    TFLOP/s and GB/s follow; the rest has defaults. Methods are called in several processes and must not keep state.

    The members from ``suites`` on are for an operation with kernels of the package (``operations.py``).
    """

    name: ClassVar[str] = ""
    # The results in order; by default those of ``reference``, all required.
    outputs: ClassVar[tuple[Output, ...]] = ()
    # Distributions of the inputs in the correctness stage; omit those on which the operation is undefined.
    distributions: ClassVar[tuple[str, ...]] = (*DISTRIBUTIONS, "huge")
    # Other ways to call it, in words; ``variant`` gives the contract of each.
    variants: ClassVar[tuple[str, ...]] = ()
    # Other ways in which the sweep calls it: in modes of PyTorch, on a thread (keys of measure.finding.CALL_MODES).
    calls: ClassVar[tuple[str, ...]] = ("inference", "no_grad", "gradients", "default", "thread")
    # Inputs without a gradient, besides those that are not floats of 16 bits or more.
    constants: ClassVar[frozenset[str]] = frozenset()
    # More variants, only for the sweep: on every problem, on a few of each kind, on the plainest.
    everywhere: ClassVar[tuple[str, ...]] = ()
    sweep_variants: ClassVar[tuple[str, ...]] = ()
    edge_variants: ClassVar[tuple[str, ...]] = ()

    def default_problems(self) -> Sequence[Problem | str]:
        """What is measured when no problem is named: problems, or their texts. Without any, one must be named."""
        return ()

    def sweep(self) -> Sequence[Problem | str]:
        """Tiny problems on which only correctness is checked, some 40 to 80, the plainest first: problems, or their texts."""
        return self.default_problems()

    def sweep_of(self, fn: Callable[..., Any]) -> Sequence[Problem | str]:
        """The sweep for this candidate: ``sweep``, and problems for its optional arguments."""
        return self.sweep()

    def cannot(self, problem: Any) -> str | None:
        """Why a candidate of this contract cannot be given a problem, in words; None if it can."""
        return None if problem.op == self.name else f"it is held to the contract of {self.name}, not of {problem.op}"

    def inputs(self, problem: Any, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """New tensors for one call, standard normal or the like, drawn only from ``generator`` (on ``device``)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its inputs are")

    def call(self, fn: Callable[..., Any], problem: Any, inputs: Inputs) -> Any:
        """How a candidate is called: by default with the tensors as positional arguments, in the order of ``inputs``."""
        return fn(*inputs.values())

    def reference(self, problem: Any, inputs: Inputs) -> Outputs:
        """What is right: one tensor or a tuple. Floating inputs and results are fp64."""
        raise NotImplementedError(f"{type(self).__name__} has no reference")

    def widened(self, inputs: Inputs) -> Inputs:
        """The inputs as ``reference`` gets them: every floating one in fp64. An operation with tens of gigabytes of inputs may
        leave them as they are and widen parts itself."""
        return {name: one.double() if one.is_floating_point() else one for name, one in inputs.items()}

    def mistakes(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        """The results of common mistakes, the likeliest first, so that a wrong answer can be named. Floating inputs are fp64.
        Each is computed only if the one before did not match."""
        return iter(())

    def plain(self, problem: Any, inputs: Inputs) -> Outputs:
        """The same maths done plainly in the inputs' own dtype; an honest kernel is not much worse.

        Shapes and dtypes of its results are those that a candidate must return.
        """
        return self.reference(problem, inputs)

    def cap(self, problem: Any, inputs: Inputs, reference: tuple[torch.Tensor, ...]) -> tuple[Errors, ...] | None:
        """The largest error allowed for each result, whatever the plain maths' error; None for the general cap (sixteen
        roundings of the largest result: ``measure.tolerance.general_cap``)."""
        return None

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs in one of ``distributions``. By default every floating tensor is changed alike."""
        change = _CHANGES[distribution]
        return {name: change(tensor) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}

    def poisoned(self, problem: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs, with NaN in what no call may use (such as a buffer's end), for the correctness stage. By default
        unchanged."""
        return inputs

    def variant(self, name: str) -> Contract:
        """This contract with one of ``variants``: the same operation, called or parametrised otherwise."""
        raise NotImplementedError(f"{type(self).__name__} has no variant {name!r}")

    def flops(self, problem: Any) -> int:
        """Arithmetic of one call, for TFLOP/s."""
        return int(problem.flops())

    def min_bytes(self, problem: Any) -> int:
        """Bytes that one call must move, for GB/s and the floor on its time."""
        return int(problem.min_bytes())

    def rivals(self) -> Mapping[str, Callable[..., Any]]:
        """What a user would pick instead, by name, called like the candidate. Without any, the rival is ``plain``."""
        return {}

    def rounding(self, problem: Any, inputs: Inputs) -> tuple[float, ...] | None:
        """An addition to each result's rounding floor, for fp32 sums in another order; None for nothing."""
        return None

    def bounds(
        self, problem: Any, inputs: Inputs, reference: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[Errors, ...] | None, tuple[float, ...] | None]:
        """``cap`` and ``rounding``. A contract that derives both together overrides this instead."""
        return self.cap(problem, inputs, reference), self.rounding(problem, inputs)

    def suites(self) -> Mapping[str, Sequence[str]]:
        """Named lists of problems, as text. "quick" is what a GPU measures by default, "cpu" what a CPU does."""
        return {}

    def draw(self, near: Any, chance: Random) -> Problem:
        """A problem drawn at random around one of a suite, only from ``chance``."""
        raise NotImplementedError(f"problems of {self.name} cannot be drawn at random")

    def smoke(self, device: Device) -> str | None:
        """A tiny problem on which every kernel of ours runs once before anything is measured; None for none."""
        return None

    def build_problems(self) -> Sequence[str]:
        """Problems for which kernels are compiled for GPUs that are not here."""
        return ()

    def small_problems(self) -> Sequence[str]:
        """Problems that Triton's interpreter does in seconds: odd and tiny shapes, every flag."""
        return ()

    # Patterns of kernel names, each with its owner: a peer that launches another family than it promised has fallen back.
    families: ClassVar[Mapping[str, str]] = {}

    def for_kernel(self, problem: Any, inputs: Inputs) -> Any:
        """The inputs as the operation's kernels take them (the I of Kernel[P, I, O]), every output asked for."""
        raise NotImplementedError(f"no kernel of the package takes the inputs of {self.name}")

    def renew(self, problem: Any, inputs: Inputs, given: Any) -> None:
        """Update in place what ``for_kernel`` computed from inputs whose values have changed since."""

    def from_kernel(self, result: Any) -> tuple[Any, ...]:
        """What those kernels return, as results in the order of ``outputs``."""
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def timed_inputs(self, inputs: Any) -> Any:
        """The inputs of ``for_kernel`` for a timed call: without the outputs that a user seldom asks for."""
        return inputs

    def planned(self, kernel: AnyKernel, config: Config, like: Any) -> Callable[[Any], Any]:
        """A call of a kernel on inputs like these that only allocates results and launches: what a graph holds."""
        return lambda inputs: kernel.run(inputs, config)

    def user_call(self, kernel: AnyKernel, config: Config, problem: Any, device: Device) -> Callable[[Any], Any] | None:
        """The public function that runs this very kernel and config, called as by a user; None if there is none."""
        return None

    @staticmethod
    def dtype(problem: Any) -> torch.dtype:
        """The problem's dtype, as PyTorch's."""
        import torch

        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[problem.dtype]

    def problem(self, dtype: Dtype, **sizes: int) -> CustomProblem:
        """A problem of this operation with its cost filled in."""
        free = CustomProblem(self.name, tuple(sizes.items()), dtype, 0, 0)
        return CustomProblem(self.name, tuple(sizes.items()), dtype, self.flops(free), self.min_bytes(free))


def contract(held_to: Contract | str) -> Callable[[F], F]:
    """Mark a function as held to a contract: an instance of your own, or the name of one that comes with the package."""

    def mark(fn: F) -> F:
        fn.contract = held_to  # type: ignore[attr-defined]
        return fn

    return mark


def contract_of(fn: Any) -> Contract:
    """The contract of a candidate: attention's, where it names none.

    Raises:
        ValueError: ``fn.contract`` is neither a Contract nor the name of one.
    """
    held_to = getattr(fn, "contract", DEFAULT)
    one = held_to if isinstance(held_to, Contract) else built_in(held_to)
    if not one.name:
        raise ValueError(f"contract {type(one).__name__} has no name; give it the word that follows 'op' in its problems")
    return one


def built_in(name: object) -> Contract:
    """The contract of an operation of the package. Raises ValueError where there is none of that name."""
    if isinstance(name, str) and is_operation(name):
        return operation(name).contract()
    names = ", ".join(one.name for one in OPERATIONS)
    raise ValueError(f"contract is {name!r}; it must be an instance of Contract or one of {names}")


def is_built_in(one: Contract) -> bool:
    """Whether a contract is the package's own, and not a subclass of it."""
    return is_operation(one.name) and type(one) is type(built_in(one.name))


def arguments_of(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments; none where Python does not know them."""
    try:
        return tuple(signature(fn).parameters)
    except (TypeError, ValueError):
        return ()


# "large" makes softmaxes of scores nearly one-hot, "huge" those of the inputs themselves, and exponentials of either infinite;
# "tiny" is near the least normal number of fp16.
_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda tensor: tensor,
    "zeros": lambda tensor: tensor.zero_(),
    "constant": lambda tensor: tensor.fill_(0.625),
    "large": lambda tensor: tensor.mul_(8.0),
    "huge": lambda tensor: tensor.mul_(64.0),
    "tiny": lambda tensor: tensor.mul_(2.0**-10),
}
