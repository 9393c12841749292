"""The mask that transformers' models make once a forward pass, as a window and lengths that kernels take, without a matrix.

transformers describes a mask by a function of indices, the cache's lengths and a 2-D padding mask, and asks the attention
implementation for the mask of each layer. ``make_mask`` returns a ``StructuredMask`` if the keys that a query sees are an
interval, else transformers' own boolean matrix. A model may treat the first like the second: an operation on it makes the
matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashmoe_science.ops.private import private

Indices = Callable[..., Any]  # (batch, head, query, key) -> whether the query sees the key


@classmethod  # type: ignore[misc]  # it becomes a class's method
def _plain_results(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


_PLAIN_RESULTS: Any = private("_C._disabled_torch_function_impl", _plain_results, "a structured mask is slower")


def _with_matrices(given: Any) -> Any:
    """The argument of an operator, a matrix for each StructuredMask in it."""
    if isinstance(given, list | tuple):
        return (list if isinstance(given, list) else tuple)(map(_with_matrices, given))
    return given.matrix() if isinstance(given, StructuredMask) else given


class Packed(NamedTuple):
    """The queries and the keys of all rows as packed sequences, in the terms of FlashAttention.

    A padded row is two sequences; the first is its padding, which sees no keys. So nothing is gathered, and padding gets zeros.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class Visible:
    """The keys that each query sees, of the [batch, 1, queries, keys] mask.

    length: only the first ``length`` keys exist; the last query is at the last of them, where a causal mask ends.
    causal: a query sees no key after it.
    left, right: how many keys before and after its own a query sees; None for no limit.
    first, end: int32 [batch], the valid keys of each sequence, from ``first`` to ``end`` (excluded). All if ``end`` is None;
        from 0 if only ``first`` is None. If a query's place matters, ``end`` is the length.
    padded: behind the valid keys is padding, which only its own queries see.
    sequences: packed in the rows, each sees only itself; ``causal``, ``left`` and ``right`` count places in them. None: each
        row is one.
    """

    length: int
    causal: bool
    left: int | None = None
    right: int | None = None
    first: torch.Tensor | None = None
    end: torch.Tensor | None = None
    padded: bool = False
    sequences: Packed | None = None


class StructuredMask(torch.Tensor):
    """A boolean [batch, 1, queries, keys] mask, described by ``visible`` alone. An operation on it makes its matrix."""

    visible: Visible
    _make: Callable[[], torch.Tensor]
    _matrix: torch.Tensor | None
    _packed: Packed | None

    __torch_function__ = _PLAIN_RESULTS

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device | str, visible: Visible, make: Callable[[], torch.Tensor]
    ) -> StructuredMask:
        mask: StructuredMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        mask.visible, mask._make, mask._matrix, mask._packed = visible, make, None, None
        return mask

    def matrix(self) -> torch.Tensor:
        """The mask as a plain tensor, made once."""
        if self._matrix is None:
            self._matrix = self._make()
        return self._matrix

    def packed(self) -> Packed | None:
        """The mask of packed sequences, made once; None if each row is one, without padding."""
        if self._packed is None and self.visible.end is not None:
            self._packed = _packed(self.visible, self.visible.end, self.shape[2])
        return self.visible.sequences or self._packed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            raise ValueError("a model adds its mask to scores, and attn_implementation='fms' makes boolean masks: use 'eager'")
        return func(*_with_matrices(args), **{name: _with_matrices(one) for name, one in (kwargs or {}).items()})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StructuredMask({tuple(self.shape)}, {self.visible})"


def _packed(visible: Visible, end: torch.Tensor, queries: int) -> Packed:
    first = torch.zeros_like(end) if visible.first is None else visible.first
    place = torch.arange(end.shape[0], device=end.device)
    lead = torch.zeros_like(first)  # queries that see no key: those of padding, unless they see keys after their own place
    after = 0 if visible.causal else visible.right
    if after is not None:
        lead = (first - after - (visible.length - queries)).clamp(0, queries)
    of_queries = torch.stack((place * queries + lead, (place + 1) * queries), 1)
    of_keys = torch.stack((place * visible.length + first, place * visible.length + end), 1)
    used = torch.stack((torch.zeros_like(end), end - first), 1)
    cu_seqlens_q, cu_seqlens_k = (torch.nn.functional.pad(one.flatten(), (1, 0)).int() for one in (of_queries, of_keys))
    return Packed(cu_seqlens_q, cu_seqlens_k, used.flatten().int(), queries, visible.length)


def make_mask(**arguments: Any) -> torch.Tensor | None:
    """The mask of a forward pass, for transformers, by the keywords of its ``sdpa_mask``.

    Returns:
        None if the module's ``is_causal`` describes the mask, else a boolean [batch, 1, queries, keys] mask.

    Raises:
        ValueError: the model has its own attention code, which would take None for no mask.
    """
    from transformers.masking_utils import bidirectional_mask_function

    configured = type(arguments.get("config"))
    reached, has_flags = _attention_of(configured.__module__)
    mask = _mask(arguments if has_flags else {**arguments, "allow_is_causal_skip": False})
    if not reached and (mask is not None or arguments.get("mask_function") is not bidirectional_mask_function):
        name = configured.__name__.removesuffix("Config")
        raise ValueError(f"{name} attends by code of its own, which attn_implementation='fms' does not reach: use 'eager'")
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile calls it, and does not trace it
def _attention_of(of_config: str) -> tuple[bool, bool]:
    return _cached_attention(of_config)


@lru_cache(maxsize=256)
def _cached_attention(of_config: str) -> tuple[bool, bool]:
    """Whether the model whose configuration is in that module uses the given attention implementation, and whether its layers
    say if they are causal, as SDPA and FlashAttention need. A module outside transformers is assumed to do both."""
    modeling = sys.modules.get(of_config.replace(".configuration_", ".modeling_"))
    if modeling is None or not of_config.startswith("transformers.models."):
        return True, True
    own = [one for one in vars(modeling).values() if isinstance(one, type) and one.__module__ == modeling.__name__]
    attends = any("Attention" in one.__name__ for one in own)
    reached = hasattr(modeling, "ALL_ATTENTION_FUNCTIONS") or not attends
    flagged = any(getattr(one, name, False) for one in own for name in ("_supports_sdpa", "_supports_flash_attn"))
    return reached, flagged or not attends


def _mask(arguments: dict[str, Any]) -> torch.Tensor | None:
    """``make_mask`` for a model that attends by our function."""
    from transformers.masking_utils import sdpa_mask

    visible = None if _is_traced(arguments) else _visible(arguments)
    if visible is None:
        return sdpa_mask(**arguments)  # type: ignore[no-any-return]
    batch, queries, keys = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    whole = all(one is None for one in (visible.left, visible.right, visible.end, visible.sequences)) and not visible.padded
    if whole and visible.length == keys:
        if visible.causal and arguments.get("allow_is_causal_skip", True) and queries in (1, keys):
            return None
        if not visible.causal and arguments.get("allow_is_bidirectional_skip", False):
            return None
    no_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return StructuredMask(
        (batch, 1, queries, keys), arguments["device"], visible, lambda: sdpa_mask(**{**arguments, **no_skip})
    )


def _is_traced(arguments: dict[str, Any]) -> bool:
    """Whether lengths must not be read, as a graph is or will be traced: transformers compiles decoding with a static cache."""
    from transformers.utils.import_utils import is_tracing

    static_step = arguments.get("q_length") == 1 and isinstance(arguments.get("q_offset"), torch.Tensor)
    return static_step or is_tracing(arguments.get("attention_mask"))


def _visible(arguments: dict[str, Any]) -> Visible | None:
    """The structure of the mask; None if it has another, or one that this package cannot read."""
    needed = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "device")
    if arguments.get("use_vmap") or not all(name in arguments for name in needed):
        return None
    queries, keys = arguments["q_length"], arguments["kv_length"]
    function, sequences = _of_sequences(arguments["mask_function"])
    shape = _shape_of(function)
    if shape is None or not (isinstance(queries, int) and isinstance(keys, int)):
        return None
    causal, left, right = shape
    length = int(arguments["q_offset"]) + queries - int(arguments["kv_offset"])  # up to the last query's own key
    if not causal and left is None:
        length = keys
    elif not (queries <= length <= keys and (causal or length == keys)):
        return None
    if left is not None and left >= length - 1:  # of no effect
        left = None
    if right is not None and right >= length - 1:
        right = None
    padding = arguments.get("attention_mask")
    if padding is None:
        return Visible(length, causal, left, right, sequences=None if sequences is None else _starts(sequences))
    if sequences is not None:
        return None
    return _padded(Visible(length, causal, left, right), padding, arguments["kv_offset"], arguments["batch_size"])


def _of_sequences(function: Indices) -> tuple[Indices, torch.Tensor | None]:
    """A mask function of transformers for the places in a sequence, and the sequence [batch, tokens] of each token, None if
    rows are not packed."""
    from transformers import masking_utils as hf

    parts = _closed_over(function, hf.and_masks, "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2:
        sequence = _closed_over(parts[0], getattr(hf, "packed_sequence_mask_function", None), "packed_sequence_mask")
        within = _closed_over(parts[1], getattr(hf, "remap_positions_for_packed_sequence", None), "mask_function")
        if isinstance(sequence, torch.Tensor) and callable(within):
            return within, sequence
    return function, None


def _starts(sequence: torch.Tensor) -> Packed:
    """The start of each sequence. Waits for the GPU, as transformers did to see that there are several."""
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence.diff(dim=1) != 0
    starts = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=sequence.numel()).int()
    longest = int(starts.diff().max())
    return Packed(starts, starts, None, longest, longest)


def _shape_of(function: Indices) -> tuple[bool, int | None, int | None] | None:
    """(causal, left, right) of a mask function of transformers; None for another function."""
    from transformers import masking_utils as hf

    if function is hf.causal_mask_function:
        return True, None, None
    if function is hf.bidirectional_mask_function:
        return False, None, None
    parts = _closed_over(function, hf.and_masks, "mask_functions")
    if not (isinstance(parts, tuple) and len(parts) == 2):
        return None
    overlay, base = parts
    window = _closed_over(overlay, hf.sliding_window_overlay, "sliding_window")
    if isinstance(window, int) and base is hf.causal_mask_function:
        return True, window - 1, None  # the window of a causal mask counts the query's own key
    two_sided = getattr(hf, "sliding_window_bidirectional_overlay", None)
    window = _closed_over(overlay, two_sided, "sliding_window")
    if isinstance(window, int) and base is hf.bidirectional_mask_function:
        return False, window, window
    return None


def _closed_over(function: Any, maker: Any, name: str) -> object:
    """The value of a variable of ``maker`` in a function that ``maker`` returned; None if it was another."""
    code = getattr(function, "__code__", None)
    if maker is None or code is None or code not in maker.__code__.co_consts or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _padded(visible: Visible, padding: torch.Tensor, offset: int, batch: int) -> Visible | None:
    """``visible`` with the valid keys of a [batch, tokens] padding mask; None if they are not one interval, or end before a
    non-causal window does. What padding's queries see is undefined."""
    valid = padding[:, offset : offset + visible.length].bool()
    if valid.shape[0] != batch:
        return None
    if valid.shape[1] < visible.length:
        valid = torch.nn.functional.pad(valid, (0, visible.length - valid.shape[1]))
    if valid.all():  # waits for the GPU, after two launches: most prompts have no padding, and each new token asks again
        return visible
    count = valid.sum(1)
    begins = valid.clone()
    begins[:, 1:] &= ~valid[:, :-1]
    aligned = visible.causal or visible.left is not None or visible.right is not None
    flags = [(begins.sum(1) <= 1).all(), (valid[:, -1] | (count == 0)).all(), (valid[:, 0] | (count == 0)).all()]
    one_interval, to_the_end, from_the_start = torch.stack(flags).tolist()
    if not one_interval or (aligned and not (visible.causal or to_the_end)):
        return None
    if visible.causal and from_the_start:
        return replace(visible, padded=True)
    first = begins.int().argmax(1)
    if aligned:
        first, end = torch.where(count > 0, first, visible.length), torch.full_like(count, visible.length)
    else:
        end = first + count
    return replace(visible, first=None if from_the_start and not aligned else first.int(), end=end.int())
