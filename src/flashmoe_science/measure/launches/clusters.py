"""The cluster of each kernel that a call launches, which PyTorch's profiler does not tell: read from a CUDA graph of the call.

The graph is captured and never run. Its kernel nodes come in the order of their launches and are matched with what the profiler
saw by grid and block; where the two lists differ nothing is filled in.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.records import SeenLaunch

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_REQUIRED_CLUSTER = (11, 12, 13)  # CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, _HEIGHT, _DEPTH: of a kernel compiled for one

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelNode:
    """One kernel of a graph; a kernel without clusters has one of a single block."""

    grid: Triple
    block: Triple
    cluster: Triple


class _Params(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Attribute(ctypes.Union):
    """CUlaunchAttributeValue: 64 bytes"""

    _fields_ = (("pad", ctypes.c_byte * 64), ("cluster", ctypes.c_uint * 3))


def with_clusters(call: Callable[[], object], seen: Sequence[SeenLaunch]) -> list[SeenLaunch]:
    """What was seen of a call, with the clusters of its kernels; as it was where they cannot be read (see the top)."""
    driver = _driver()
    if driver is None:
        return list(seen)
    try:
        nodes = _nodes(driver, _captured(call).raw_cuda_graph())
    except Exception:  # a call that cannot be captured: the graph clock will say so where it matters
        torch.cuda.synchronize()
        return list(seen)
    return matched(seen, nodes)


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """By hand: ``torch.cuda.graph`` empties the allocator first, and may collect garbage, which takes longer than all of it."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    return graph


def matched(seen: Sequence[SeenLaunch], nodes: Sequence[KernelNode]) -> list[SeenLaunch]:
    """The launches, each kernel with its node's cluster; unchanged where the kernels are not the same ones."""
    kernels = [one for one in seen if one.block != (0, 0, 0)]  # copies and fills have no block
    if [(one.grid, one.block) for one in kernels] != [(node.grid, node.block) for node in nodes]:
        return list(seen)
    left = iter(nodes)
    return [one if one.block == (0, 0, 0) else one.model_copy(update={"cluster": next(left).cluster}) for one in seen]


def _nodes(driver: Any, graph: int) -> list[KernelNode]:
    """The kernels of a captured graph, in the order of their launches. Raises RuntimeError where the driver refuses."""
    count = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    handles = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), handles, ctypes.byref(count)))
    found = []
    for handle in handles:
        node, kind = ctypes.c_void_p(handle), ctypes.c_int(-1)
        _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value == _KERNEL:
            params = _Params()
            _check(driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)))
            found.append(KernelNode(_triple(params.grid), _triple(params.block), _cluster(driver, node, params)))
    return found


def _cluster(driver: Any, node: ctypes.c_void_p, params: _Params) -> Triple:
    value = _Attribute()
    _check(driver.cuGraphKernelNodeGetAttribute(node, _CLUSTER_DIMENSION, ctypes.byref(value)))
    asked = _triple(value.cluster)
    if any(asked):
        return asked
    required = [ctypes.c_int() for _ in _REQUIRED_CLUSTER]
    for size, attribute in zip(required, _REQUIRED_CLUSTER, strict=True):
        if not params.func or driver.cuFuncGetAttribute(ctypes.byref(size), attribute, ctypes.c_void_p(params.func)) != 0:
            return (1, 1, 1)
    x, y, z = (max(1, size.value) for size in required)
    return (x, y, z)


def _triple(values: Any) -> Triple:
    x, y, z = values
    return int(x), int(y), int(z)


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"the CUDA driver answered {result}")


@functools.cache
def _driver() -> Any | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in (
            "cuGraphGetNodes",
            "cuGraphNodeGetType",
            "cuGraphKernelNodeGetParams_v2",
            "cuGraphKernelNodeGetAttribute",
            "cuFuncGetAttribute",
        ):
            getattr(driver, name).restype = ctypes.c_int
    except (OSError, AttributeError):  # no driver here, or one older than CUDA 12
        return None
    return driver
