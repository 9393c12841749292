"""What is to be computed: shapes, dtypes and flags of one call, with its cost. Knows nothing of torch.

A problem has a short text form that the command line prints and parses, and that records store::

    attn b2 h16 hk4 q4096 k4096 d128 bf16 causal
    moe t4096 e64 k8 d1024 f2048 bf16
    op row_softmax rows4096 cols1024 fp16 flops16777216 bytes16777216

The first word names the operation (``operations.py`` has the list); ``operations.parse_problem(str(problem))`` is the problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

Dtype = Literal["fp16", "bf16", "fp32"]
Arithmetic = Literal["fp32", "16-bit", "8-bit", "4-bit"]

DTYPE_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_EXTENT = 2**31 - 1  # a size that a kernel's 32-bit row counter can hold
CUSTOM = "op"  # the first word of a problem of an operation that is not the package's
_MOST_DIGITS = 30  # Python refuses to read integers of thousands
_MOST_COUNT = 2**63 - 1
_SIZE = re.compile(r"([a-z][a-z_]*)([0-9]+)")
_OP = re.compile(r"[a-z][a-z0-9_]*")
_SIZE_NAME = re.compile(r"[a-z][a-z_]*")
_RESERVED = ("flops", "bytes", "fp", "bf")
_CUSTOM_GRAMMAR = "op <name> <size><n> ... fp16|bf16|fp32 flops<n> bytes<n>"


class ProblemError(ValueError):
    """A problem that cannot exist: the field, what it was and what is allowed, in one line."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The loop inside an operation: ``rows`` independent results, each of ``steps`` one after another.

    ``step_bytes`` is what one step reads, and what one row reads and writes for itself.
    """

    rows: int
    steps: int
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Series:
    """The place of a problem on a chart of speed: at ``length`` along ``axis``, on a line with the problems of its family.

    ``families`` are the labels of the families that the problem may be grouped in, the preferred first.
    """

    axis: str
    length: int
    families: tuple[tuple[str, ...], ...]


class Problem:
    """One call of an operation. A subclass is a frozen dataclass whose ``str`` is the problem's text form.

    ``flops`` and ``min_bytes`` must be given. The other methods have defaults that claim nothing, so that a new operation or
    feature is never mistaken for a similar one.
    """

    __slots__ = ()

    op: str
    dtype: Dtype

    def flops(self) -> int:
        """Multiplications and additions of one call."""
        raise NotImplementedError

    def min_bytes(self) -> int:
        """Bytes that must cross device memory."""
        raise NotImplementedError

    def input_bytes(self) -> int | None:
        """Bytes of the inputs, each read once; None where that is unknown."""
        return None

    def queries(self) -> int | None:
        """Rows that a user would count (queries, tokens); None where there are none."""
        return None

    def arithmetic(self) -> Arithmetic:
        """The narrowest operands with which products are accurate enough, by the dtype. A subclass overrides this for quantised
        operands, or if its contract allows more rounding."""
        return "fp32" if self.dtype == "fp32" else "16-bit"

    def exponentials(self) -> int:
        """Exponentials of one call."""
        return 0

    def is_products(self) -> bool:
        """Whether the arithmetic is matrix products, which tensor cores can do."""
        return False

    def walk(self) -> Walk | None:
        """The loop inside the operation, if it has one."""
        return None

    def series(self) -> Series | None:
        """The place of the problem on a chart of speed; None where it has no length to draw it against."""
        return None

    def order(self) -> tuple[object, ...]:
        """The place of the problem in the dispatch table."""
        return (self.op, self.dtype, str(self))

    def tile_key(self) -> Hashable:
        """Equal for problems whose kernels are built with the same tile shapes, so that a config carries over."""
        return str(self)

    def distance(self, other: Problem) -> float:
        """The largest factor, in log2, between the sizes that decide how a kernel should be shaped; infinite where the two
        differ in anything else."""
        return 0.0 if self == other else math.inf

    def kind(self) -> Hashable:
        """Equal for problems that differ only in the sizes that ``distance`` compares, so that another package's speed in one
        is expected in the others."""
        return str(self)

    def representative(self) -> Self:
        """The problem whose kernel and config this one shares if it was not measured itself. Sizes that change from call to
        call (lengths, batches) are rounded up in it, so that they need no new choice."""
        return self

    def traits(self) -> Mapping[str, str]:
        """The fields that distinguish problems, each with its value in words: by default all."""
        return {one.name: str(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]  # a dataclass

    def without_layout(self) -> Self:
        """The same work in the default memory order, as the dispatch table has it."""
        return self

    def gpus(self) -> int:
        """The number of GPUs that share the work."""
        return 1


@dataclass(frozen=True, slots=True)
class DistributedProblem(Problem):
    """A problem whose work several GPUs share. Text form: the ``whole`` problem's, then the ``parallelism`` and the number of
    ranks: ``cp2`` (context parallelism) or ``ep2`` (expert parallelism). Costs are those of the whole.

    Raises:
        ProblemError: fewer than 2 ranks.
    """

    whole: Problem
    parallelism: str
    ranks: int

    def __post_init__(self) -> None:
        check_extent(f"the number of ranks after {self.parallelism!r}", self.ranks, least=2)

    @property
    def op(self) -> str:  # type: ignore[override]  # no kernel of the package is of it
        return f"{self.whole.op}_{self.parallelism}"

    @property
    def dtype(self) -> Dtype:  # type: ignore[override]
        return self.whole.dtype

    def flops(self) -> int:
        return self.whole.flops()

    def min_bytes(self) -> int:
        return self.whole.min_bytes()

    def input_bytes(self) -> int | None:
        return self.whole.input_bytes()

    def queries(self) -> int | None:
        return self.whole.queries()

    def arithmetic(self) -> Arithmetic:
        return self.whole.arithmetic()

    def gpus(self) -> int:
        return self.ranks

    def __str__(self) -> str:
        return f"{self.whole} {self.parallelism}{self.ranks}"


@dataclass(frozen=True, slots=True)
class CustomProblem(Problem):
    """One call of an operation that a user's contract defines: named sizes, a dtype, and its cost by the contract.

    Text form: ``op row_softmax rows4096 cols1024 fp16 flops16777216 bytes16777216``. ``sizes`` are (name, integer) pairs in the
    order in which they are written; ``problem["rows"]`` looks one up.

    Raises:
        ProblemError: a name that is not lower case words, or is reserved; a size below 1; a size given twice.
    """

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: Dtype
    flop_count: int
    byte_count: int

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or not _OP.fullmatch(self.op):
            raise ProblemError(f"op is {self.op!r}; it must be lower case letters, digits and _, a letter first")
        for name, value in self.sizes:
            if not isinstance(name, str) or not _SIZE_NAME.fullmatch(name) or name in _RESERVED:
                allowed = f"lower case letters and _, and not {', '.join(_RESERVED)}"
                raise ProblemError(f"a size of {self.op} is named {name!r}; it must be {allowed}")
            check_extent(name, value)
        if len(dict(self.sizes)) != len(self.sizes):
            raise ProblemError(f"{self.op} gives a size twice: {', '.join(name for name, _ in self.sizes)}")
        check_dtype(self.dtype)
        check_extent("flops", self.flop_count, least=0, most=_MOST_COUNT)
        check_extent("bytes", self.byte_count, least=0, most=_MOST_COUNT)

    def __getitem__(self, name: str) -> int:
        """The size of that name. Raises ProblemError where there is none."""
        sizes = dict(self.sizes)
        check_word(f"a size of {self.op}", name, sizes)
        return sizes[name]

    def flops(self) -> int:
        return self.flop_count

    def min_bytes(self) -> int:
        return self.byte_count

    def arithmetic(self) -> Arithmetic:
        """The narrowest there is: the contract decides how much may be rounded, whatever the dtype of its results."""
        return "4-bit"

    def traits(self) -> Mapping[str, str]:
        return {"dtype": self.dtype} | {name: str(value) for name, value in self.sizes}

    def __str__(self) -> str:
        sizes = [f"{name}{value}" for name, value in self.sizes]
        return " ".join([CUSTOM, self.op, *sizes, self.dtype, f"flops{self.flop_count}", f"bytes{self.byte_count}"])


def parse_custom(text: str) -> CustomProblem:
    """Read the text form of a CustomProblem. Raises ProblemError."""
    _, *rest = text.split()
    if not rest:
        raise ProblemError(f"problem {text!r} names no operation; write: {_CUSTOM_GRAMMAR}")
    sizes, flags = read_words(" ".join(rest), _CUSTOM_GRAMMAR, None, {"dtype": get_args(Dtype)})
    require(text, _CUSTOM_GRAMMAR, sizes, ("flops", "bytes"))
    if "dtype" not in flags:
        raise ProblemError(f"problem {text!r} lacks a dtype; write: {_CUSTOM_GRAMMAR}")
    flops, moved = sizes.pop("flops"), sizes.pop("bytes")
    return CustomProblem(rest[0], tuple(sizes.items()), flags["dtype"], flops, moved)  # type: ignore[arg-type]


def rounded_up(n: int) -> int:
    """``n`` rounded up to three significant bits: itself up to 8, then four values to every doubling."""
    if n <= 8:
        return n
    low = n.bit_length() - 3
    return min(-(-n >> low) << low, MAX_EXTENT)


# The text grammar -------------------------------------------------------------------------------------------------------------


def check_extent(field: str, value: object, least: int = 1, most: int = MAX_EXTENT) -> None:
    """Refuse a size that is not an integer in range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ProblemError(f"{field} is {value!r}; it must be an integer from {least} to {most}")


def check_word(field: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a word that is not one of those allowed."""
    if value not in allowed:
        raise ProblemError(f"{field} is {value!r}; it must be one of {', '.join(allowed)}")


def check_dtype(value: object) -> None:
    check_word("dtype", value, get_args(Dtype))


def read_words(
    text: str, grammar: str, sizes: Collection[str] | None, flags: Mapping[str, Collection[str]]
) -> tuple[dict[str, int], dict[str, str]]:
    """Read the words after the first as sizes (a name and an integer, ``q4096``) and flags (``causal``).

    ``sizes`` are the names allowed, None for any; ``flags`` maps a field to the words that it may be. A word that could be
    either is a flag.

    Raises:
        ProblemError: a word is not understood or given twice; the message gives the grammar.
    """
    found: dict[str, int] = {}
    flags_found: dict[str, str] = {}
    for word in text.split()[1:]:
        field = next((field for field, allowed in flags.items() if word in allowed), None)
        if field is not None:
            if field in flags_found:
                raise ProblemError(f"problem {text!r} gives the {field} twice ({flags_found[field]!r} and {word!r})")
            flags_found[field] = word
            continue
        size = _SIZE.fullmatch(word)
        if size is None or (sizes is not None and size[1] not in sizes):
            raise ProblemError(f"problem {text!r} has the unknown word {word!r}; write: {grammar}")
        if size[1] in found:
            raise ProblemError(f"problem {text!r} gives {size[1]!r} twice")
        if len(size[2]) > _MOST_DIGITS:
            raise ProblemError(f"{size[1]} is a number of {len(size[2])} digits; no size has more than {_MOST_DIGITS}")
        found[size[1]] = int(size[2])
    return found, flags_found


def require(text: str, grammar: str, sizes: Mapping[str, int], needed: Collection[str]) -> None:
    """Refuse a text that lacks a size that has no default."""
    missing = [key for key in needed if key not in sizes]
    if missing:
        raise ProblemError(f"problem {text!r} lacks {', '.join(f'{key}<n>' for key in missing)}; write: {grammar}")
