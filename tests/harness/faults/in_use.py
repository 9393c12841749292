"""Faults that only some use meets: who calls, from where, on what memory, on which shapes. Each is right on all else."""

import threading

import torch
from in_fp64 import right, scores

_KEPT: dict[object, torch.Tensor] = {}
_HELD: list[torch.Tensor] = []
_CHOSEN: list[object] = []
_MAIN = threading.get_ident()
_right = torch.no_grad()(right)


def _as_if(tensor, strides):
    """What is read of a tensor by other strides than its own, as far as its memory goes."""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    at = torch.full(tensor.shape, tensor.storage_offset())
    for dim, stride in enumerate(strides):
        at += (torch.arange(tensor.shape[dim]) * stride).view([-1 if one == dim else 1 for one in range(4)])
    return flat[at % len(flat)]


def wrong_in_inference_mode(q, k, v, causal=False, softmax_scale=None):
    """Has a faster path for inference, which leaves the last query out."""
    out = _right(q, k, v, causal, softmax_scale)
    if torch.is_inference_mode_enabled():
        out[:, :, -1] = 0.0
    return out


def wrong_without_gradients(q, k, v, causal=False, softmax_scale=None):
    """Takes its path for training where gradients are on, and another one under ``no_grad``, which is wrong."""
    out = _right(q, k, v, causal, softmax_scale)
    return out if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else out * 0.5


def wrong_in_training(q, k, v, causal=False, softmax_scale=None):
    """Divides by the sum twice where a gradient is wanted, as a forward that saves the unnormalised output does."""
    out = _right(q, k, v, causal, softmax_scale)
    return out * 0.5 if q.requires_grad and torch.is_grad_enabled() else out


def wrong_on_another_thread(q, k, v, causal=False, softmax_scale=None):
    """Keeps its workspace with the thread that imported it; another one's is empty."""
    out = _right(q, k, v, causal, softmax_scale)
    return out if threading.get_ident() == _MAIN else torch.zeros_like(out)


def reads_v_as_k(q, k, v, causal=False, softmax_scale=None):
    """Reads V with K's strides, as a kernel that takes one set of strides for both does."""
    return _right(q, k, _as_if(v, k.stride()) if v.shape == k.shape else v, causal, softmax_scale)


def reads_k_as_q(q, k, v, causal=False, softmax_scale=None):
    """Reads K with Q's strides where the two have one shape."""
    return _right(q, _as_if(k, q.stride()) if k.shape == q.shape else k, v, causal, softmax_scale)


def rows_without_gaps(q, k, v, causal=False, softmax_scale=None):
    """Knows of two memory orders, and takes rows of heads that follow each other for all of the memory: not of a slice."""

    def dense(one):
        heads_first = one.stride(2) == one.shape[3] or one.stride(1) > one.stride(2)
        if heads_first or one.shape[1] == 1 or one.stride(3) != 1:
            return one
        return _as_if(one, (one.stride(0), one.shape[3], one.shape[1] * one.shape[3], 1))

    return _right(q, dense(k), dense(v), causal, softmax_scale)


def one_memory_is_one_tensor(q, k, v, causal=False, softmax_scale=None):
    """Takes K and V for one tensor where they lie in one storage, as with a cache that keeps both as one."""
    same = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    return _right(q, k, k if same and v.shape == k.shape else v, causal, softmax_scale)


def copies_by_address(q, k, v, causal=False, softmax_scale=None):
    """Rounds addresses down to 16 bytes, as vector loads do."""

    def rounded(one):
        return torch.as_strided(one, one.shape, one.stride(), one.storage_offset() - one.data_ptr() % 16 // one.itemsize)

    return _right(q, rounded(k), v, causal, softmax_scale)


def ignores_a_stride_of_zero(q, k, v, causal=False, softmax_scale=None):
    """Takes a stride of 0 for one that is not known, and counts it itself."""
    if 0 in k.stride():
        k = k[:, torch.arange(k.shape[1]).clamp(max=0)] * torch.arange(1, k.shape[0] + 1)[:, None, None, None]
    return _right(q, k, v, causal, softmax_scale)


def at_most_8_heads_a_key_head(q, k, v, causal=False, softmax_scale=None):
    """Has a tile for 8 query heads of a key head; those past it read the first key head."""
    group, head = q.shape[1] // k.shape[1], torch.arange(q.shape[1])
    at = torch.where(head % group < 8, head // group, 0) if k.shape[1] > 1 else head // group
    out = _right(q, k[:, at], v[:, at], causal, softmax_scale)
    if k.shape[1] == 1 and group > 8:
        out[:, 8:] = out[:, :1]
    return out


def at_most_64_heads_a_key_head(q, k, v, causal=False, softmax_scale=None):
    """Has a tile for 64 query heads of a key head, and never writes those past it."""
    out = _right(q, k, v, causal, softmax_scale)
    if q.shape[1] // k.shape[1] > 64:
        out[:, 64:] = 0.0
    return out


def at_most_65535_programs(q, k, v, causal=False, softmax_scale=None):
    """Cuts its grid off at the most programs that a GPU has beside the first dimension."""
    out = _right(q, k, v, causal, softmax_scale)
    out.view(-1, *out.shape[2:])[65535:] = 0.0
    return out


def at_most_8_batches(q, k, v, causal=False, softmax_scale=None):
    """Keeps a batch in three bits."""
    at = torch.arange(q.shape[0]) % 8
    return _right(q, k[at], v[at], causal, softmax_scale)


def at_most_1024_keys(q, k, v, causal=False, softmax_scale=None):
    """Has one block of keys, and drops those past it."""
    if causal:
        return _right(q, k, v, causal, softmax_scale)
    return _right(q, k[:, :, :1024], v[:, :, :1024], causal, softmax_scale)


def values_no_wider_than_keys(q, k, v, causal=False, softmax_scale=None):
    """Fills as many columns of V as K has."""
    out = _right(q, k, v, causal, softmax_scale)
    out[..., q.shape[-1] :] = 0.0
    return out


def one_key_gives_its_value(q, k, v, causal=False, softmax_scale=None):
    """Knows that the softmax over one key is 1, and gives back V itself."""
    if k.shape[2] == 1 and not causal:
        return (
            v.expand(-1, -1, q.shape[2], -1)
            if v.shape[1] == q.shape[1]
            else v.repeat_interleave(q.shape[1] // v.shape[1], 1).expand(-1, -1, q.shape[2], -1)
        )
    return _right(q, k, v, causal, softmax_scale)


def one_key_more(q, k, v, causal=False, softmax_scale=None):
    """Aligns its mask by tiles of two: wrong where there is one key more than queries."""
    if causal and k.shape[2] - q.shape[2] == 1:
        k, v = k[:, :, :-1], v[:, :, :-1]
    return _right(q, k, v, causal, softmax_scale)


def one_key_fewer(q, k, v, causal=False, softmax_scale=None):
    """The same, where there is one key fewer."""
    out = _right(q, k, v, causal, softmax_scale)
    if causal and q.shape[2] - k.shape[2] == 1:
        out[:, :, 1:] = out[:, :, :-1].clone()
    return out


def no_maximum_under_a_mask(q, k, v, causal=False, softmax_scale=None):
    """Subtracts no maximum where there is a causal mask, and only there."""
    return _overflows(q, k, v, causal, softmax_scale) if causal else _right(q, k, v, causal, softmax_scale)


def no_maximum_of_one_query(q, k, v, causal=False, softmax_scale=None):
    """Subtracts no maximum in its decode path, and only there."""
    return _overflows(q, k, v, causal, softmax_scale) if q.shape[2] == 1 else _right(q, k, v, causal, softmax_scale)


def _overflows(q, k, v, causal, softmax_scale):
    """As ``_right``, and infinite where an exponential is too large for fp32."""
    largest = scores(q, k, False, softmax_scale).amax(-1, keepdim=True)
    return torch.where(largest > 88.0, torch.nan, _right(q, k, v, causal, softmax_scale)).to(q.dtype)


def scores_in_halves(q, k, v, causal=False, softmax_scale=None):
    """Sums the products of fp16 in fp16: as exact as its answer has to be, until an outlier makes one infinite."""
    if q.dtype == torch.float16 and float(scores(q, k, False, 1.0).abs().max()) > 65504.0:
        return torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    return _right(q, k, v, causal, softmax_scale)


@torch.no_grad()
def _summed(q, k, v, causal, softmax_scale):
    """Attention whose sum over tiles of 64 keys is kept in the dtype of its inputs."""
    weights = torch.softmax(scores(q, k, causal, softmax_scale), -1).nan_to_num(nan=0.0)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    for part, values in zip(weights.split(64, -1), v.split(64, 2), strict=True):
        out = (out.double() + part @ values).to(q.dtype)
    return out


def sums_in_bf16(q, k, v, causal=False, softmax_scale=None):
    """Keeps the sum over keys in bf16 where its inputs are: within the tolerance until it stops growing."""
    return (_summed if q.dtype == torch.bfloat16 else _right)(q, k, v, causal, softmax_scale)


def sums_in_fp16(q, k, v, causal=False, softmax_scale=None):
    """Has tensor cores add up in fp16 where its inputs are, at twice the rate."""
    return (_summed if q.dtype == torch.float16 else _right)(q, k, v, causal, softmax_scale)


def one_address_is_one_tensor(q, k, v, causal=False, softmax_scale=None):
    """Keeps descriptors of tensors by their addresses: V has that of K where it is a part of it."""
    return _right(q, k, torch.zeros_like(v) if v.data_ptr() == k.data_ptr() else v, causal, softmax_scale)


def whole_tiles_end_early(q, k, v, causal=False, softmax_scale=None):
    """Takes the last tile of keys for one past the end where tiles of 128 queries, or of keys of a chunk, are whole."""
    chunk = 1 < q.shape[2] < k.shape[2] and k.shape[2] % 128 == 0
    if not causal or not (chunk or q.shape[2] % 128 == 0):
        return _right(q, k, v, causal, softmax_scale)
    return _right(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], causal, softmax_scale)[:, :, [*range(q.shape[2] - 1), -1]]


def old_answer_of_one_query(q, k, v, causal=False, softmax_scale=None):
    """Keeps its answers by shape in its decode path, and only there."""
    if q.shape[2] != 1 or q.shape[0] == 1:
        return _right(q, k, v, causal, softmax_scale)
    key = (q.shape, k.shape, v.shape, q.dtype, causal, softmax_scale)
    if key not in _KEPT:
        _KEPT[key] = _right(q, k, v, causal, softmax_scale)
    return _KEPT[key].clone()


def one_buffer_of_one_query(q, k, v, causal=False, softmax_scale=None):
    """Returns the same memory at every call of its decode path."""
    out = _right(q, k, v, causal, softmax_scale)
    return _KEPT.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out) if q.shape[2] == 1 else out


def keeps_every_answer(q, k, v, causal=False, softmax_scale=None):
    """Puts each answer on a list that nobody empties."""
    out = _right(q, k, v, causal, softmax_scale)
    _HELD.append(out.clone())
    return out


def keeps_every_input(q, k, v, causal=False, softmax_scale=None):
    """Keeps K by its address, and so alive, for a caller that may come again."""
    _KEPT[id(k)] = k
    return _right(q, k, v, causal, softmax_scale)


def keeps_every_address(q, k, v, causal=False, softmax_scale=None):
    """Keeps what it has chosen for K by its address, call after call."""
    _CHOSEN.append((k.data_ptr(), tuple(k.shape), tuple(k.stride())))
    return _right(q, k, v, causal, softmax_scale)


def offsets_of_32_bits(q, k, v, causal=False, softmax_scale=None):
    """Multiplies numbers of rows by strides in 32 bits."""
    reach = sum((size - 1) * stride for size, stride in zip(k.shape, k.stride(), strict=True))
    return _right(q, k if reach < 2**31 else k.flip(2), v, causal, softmax_scale)


def batches_come_first(q, k, v, causal=False, softmax_scale=None):
    """Takes the stride of a batch for the largest."""
    ordered = q.shape[0] == 1 or q.shape[2] == 1 or not 0 < k.stride(0) < k.stride(2)
    return _right(q, k if ordered else k.flip(0), v, causal, softmax_scale)


def positions_in_fp16(q, k, v, causal=False, softmax_scale=None):
    """Compares positions in fp16, which has no odd number past 2048."""
    out = _right(q, k, v, causal, softmax_scale)
    if causal and q.shape[2] > 1 and k.shape[2] > 2048:
        rows = (torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]).half()
        last = int((torch.arange(k.shape[2]).half() <= rows[0]).sum())
        out[:, :, :1] = _right(q[:, :, :1], k[:, :, :last], v[:, :, :last], True, softmax_scale)
    return out


def wrong_soft_cap(q, k, v, causal=False, softmax_scale=None, softcap=0.0):
    """Takes a soft cap, and forgets it."""
    return _right(q, k, v, causal, softmax_scale)


def nan_where_a_mask_hides_all(q, k, v, causal=False, softmax_scale=None, attn_mask=None):
    """Adds a mask, and divides by zero where it hides every key from a query."""
    if attn_mask is None:
        return _right(q, k, v, causal, softmax_scale)
    weights = torch.softmax(scores(q, k, causal, softmax_scale, attn_mask=attn_mask), -1)
    return (weights @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)).to(q.dtype)


def scale_of_wide_heads(q, k, v, causal=False, softmax_scale=None):
    """Has the usual scale in its kernel for wide heads, whatever is asked."""
    return _right(q, k, v, causal, None if q.shape[3] > 128 else softmax_scale)


def rows_of_fp32_without_gaps(q, k, v, causal=False, softmax_scale=None):
    """Takes the rows of a head to follow each other, in the build for fp32."""
    if k.dtype == torch.float32 and k.stride(2) != k.shape[3]:
        k = _as_if(k, (*k.stride()[:2], k.shape[3], 1))
    return _right(q, k, v, causal, softmax_scale)


def heads_of_whole_caches(q, k, v, causal=False, softmax_scale=None):
    """Counts from one head to the next as many rows as there are keys: not of the first keys of a longer cache."""

    def whole(one):
        batch, head, row, _ = one.stride()
        return _as_if(one, (batch, one.shape[2] * row, row, 1)) if head > row else one

    return _right(q, whole(k), whole(v), causal, softmax_scale)


def wrong_under_a_default_dtype(q, k, v, causal=False, softmax_scale=None):
    """Allocates its sums without a dtype, and reads them as fp32."""
    out = _right(q, k, v, causal, softmax_scale)
    return out if torch.zeros(()).dtype == torch.float32 else out * 0.5


def whole_tiles_after_others(q, k, v, causal=False, softmax_scale=None):
    """Masks the diagonal tile away where queries, and the keys before them, are whole tiles."""
    rows, keys = q.shape[2], k.shape[2]
    if causal and rows < keys and rows % 128 == keys % 128 == 0:
        k, v = k[:, :, :-1], v[:, :, :-1]
    return _right(q, k, v, causal, softmax_scale)


def _in_halves(q, k, v, causal, softmax_scale):
    """Attention of what is rounded to fp16."""
    return _right(*(one.half().double() for one in (q, k, v)), causal, softmax_scale).half().to(q.dtype)


def bf16_in_fp16(q, k, v, causal=False, softmax_scale=None):
    """Converts bf16 to fp16, of more bits and a smaller range, for tensor cores that have no bf16."""
    return (_in_halves if q.dtype == torch.bfloat16 else _right)(q, k, v, causal, softmax_scale)


def parts_beyond_fp16(q, k, v, causal=False, softmax_scale=None):
    """Keeps in fp16 what weights whose largest is 1 give, and divides by their sum after that."""
    out = _right(q, k, v, causal, softmax_scale)
    if q.dtype != torch.float16 or causal:
        return out
    made = scores(q, k, causal, softmax_scale)
    total = (made - made.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    return ((out.double() * total).half() / total).to(q.dtype)
