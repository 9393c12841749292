"""Eager calls with a cache, packed sequences or a mask that were met before: found by all but their values, then launched.

A call that is found makes no view, checks nothing again, and appends to a cache in the launch that attends to it. What is not
found, is traced, differentiated or otherwise no plain eager call of our kernel, takes the long way (serving.py, masks.py),
which refuses what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashmoe_science.ops.attention.call.modes_spec import ModesSpec
from flashmoe_science.ops.attention.front.append_fallback import Append
from flashmoe_science.ops.attention.front.append_op import check_append
from flashmoe_science.ops.attention.front.modes_calls import Result, bind_known_call
from flashmoe_science.ops.attention.problem.features import Extras
from flashmoe_science.ops.plan import MOST_CALLS, PLAIN, Cache, could_be_known, guards_of, is_undisturbed

if TYPE_CHECKING:
    from flashmoe_science.ops.attention.call.inputs import KnownLaunch

# (q, k or k_cache, v or v_cache, cu_seqlens_q, cu_seqlens_k, cache_seqlens or seqused_k, page_table, cache_batch_idx,
# cache_leftpad, s_aux, alibi_slopes, attn_mask, k_descale, v_descale; then what is appended: k, v, rotary_cos, rotary_sin,
# rotary_seqlens) as the public functions have them; cache_seqlens is None where it is an integer.
Tensors = tuple[torch.Tensor | None, ...]
NO_APPEND = (None,) * 5
ALL_KEYS = 2**31 - 1  # the length where no sequence ends before the keys do
_MOST_ALIKE = 4  # calls that differ in the shapes and strides of tensors other than q


class Known(NamedTuple):
    """A call's launch, None where it takes the long way, and whether tensors are like those that it was bound to."""

    fits: Callable[..., bool]
    launch: KnownLaunch | None


CALLS: Cache[Hashable, tuple[Known, ...]] = Cache(MOST_CALLS)


def launch_known(
    tensors: Tensors, length: int, window: Any, scale: Any, options: tuple[Hashable, ...]
) -> tuple[Result | None, Hashable]:
    """The result of a call that is known, else None; and the key of a call that may become so, else None.

    Args:
        length: the keys of each sequence where the tensors have no lengths. It is no part of the key.
        window: ``window_size``. options: all other arguments that are no tensors.
    """
    if window.__class__ is not tuple or length < 0:
        return None, None
    if scale is not None and not (scale.__class__ is float and isfinite(scale)):
        return None, None
    try:
        # Types tell True from 1 and what is None from what is not.
        kinds = tuple(map(type, (*tensors, *window, *options)))
        q: Any = tensors[0]
        key = (window, options, kinds, q.shape, scale is None or scale > 0.0, torch.is_grad_enabled())
        known = CALLS.get(key, ())
        given = [one for one in tensors if one is not None]
        if not could_be_known(given):
            return None, None
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, an option that has no hash, a nested query: no shape
        return None, None
    for one in known:
        if one.fits(*given):
            return (None, None) if one.launch is None else (one.launch(tensors, length, scale), None)
    return None, key


def first_launch(
    key: Hashable,
    tensors: Tensors,
    length: int,
    views: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    extras: Extras,
    spec: ModesSpec,
    scale: float | None,
    append: Append | None,
    tokens_first: bool = True,
) -> Result | None:
    """Check a call, know it from now on, and launch it; None where it takes the long way.

    Args:
        key, tensors, length, scale: as of ``launch_known``.
        views: q, k and v, heads before tokens. extras: with the lengths before the append.
        tokens_first: whether the output's tokens come before its heads.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line; Unserved where PyTorch's own attention may take it.
    """
    if not is_undisturbed():
        return None
    q, k, v = views
    plain = all(type(one) in PLAIN and not one.is_neg() for one in tensors if one is not None)
    launch = None
    if plain and tensors[0] is not None and tensors[0].dtype == q.dtype:
        if append is not None:
            assert extras.cache_seqlens is not None
            new_k, new_v, cos, sin, rotary_seqlens, _, _ = append
            check_append(k, v, new_k, new_v, q, extras.cache_seqlens, None, cos, sin, rotary_seqlens)
        launch = bind_known_call(q, k, v, extras, spec, scale is None or scale > 0.0, append, tensors[5] is None, tokens_first)
    remember(key, tensors, launch)
    return None if launch is None else launch(tensors, length, scale)


def remember(key: Hashable, tensors: Tensors, launch: KnownLaunch | None) -> None:
    """Know calls of that key whose tensors are like these. No tensor is held."""
    known = Known(guards_of([one for one in tensors if one is not None]), launch)
    CALLS[key] = (known, *CALLS.get(key, ())[: _MOST_ALIKE - 1])
