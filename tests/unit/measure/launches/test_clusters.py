"""Clusters are filled in where the graph's kernels are the profiler's, and nowhere else."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashmoe_science.measure.launches import clusters
from flashmoe_science.measure.launches.clusters import KernelNode, matched, with_clusters
from flashmoe_science.records import SeenLaunch

GRID, BLOCK = (4, 2, 1), (384, 1, 1)
FILL = SeenLaunch(name="Memset (Device)", grid=(0, 0, 0), block=(0, 0, 0), shared_bytes=0)
KERNEL = SeenLaunch(name="fwd", grid=GRID, block=BLOCK, shared_bytes=1000)


def test_each_kernel_has_its_nodes_cluster_and_a_fill_has_none() -> None:
    nodes = [KernelNode(GRID, BLOCK, (2, 1, 1)), KernelNode(GRID, BLOCK, (1, 1, 1))]
    assert [one.cluster for one in matched([KERNEL, FILL, KERNEL], nodes)] == [(2, 1, 1), None, (1, 1, 1)]


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [KernelNode(GRID, BLOCK, (2, 1, 1))] * 2,
        [KernelNode((8, 2, 1), BLOCK, (2, 1, 1))],
        [KernelNode(GRID, (32, 1, 1), (2, 1, 1))],
    ],
    ids=["fewer", "more", "another grid", "another block"],
)
def test_other_kernels_fill_in_nothing(nodes: list[KernelNode]) -> None:
    assert matched([KERNEL], nodes) == [KERNEL]


class Driver:
    """A driver that knows a graph of a fill and two kernels: one launched with a cluster, one compiled for one."""

    def cuGraphGetNodes(self, graph: ctypes.c_void_p, nodes: object, count: object) -> int:
        count._obj.value = 3
        for index in range(3 if nodes is not None else 0):
            nodes[index] = index + 1
        return 0

    def cuGraphNodeGetType(self, node: ctypes.c_void_p, kind: object) -> int:
        kind._obj.value = 2 if node.value == 1 else 0
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: ctypes.c_void_p, params: object) -> int:
        params._obj.func, params._obj.grid, params._obj.block = node.value * 100, GRID, BLOCK
        return 0

    def cuGraphKernelNodeGetAttribute(self, node: ctypes.c_void_p, attribute: int, value: object) -> int:
        assert attribute == 4
        value._obj.cluster = (2, 1, 1) if node.value == 2 else (0, 0, 0)
        return 0

    def cuFuncGetAttribute(self, value: object, attribute: int, function: ctypes.c_void_p) -> int:
        assert function.value == 300
        value._obj.value = {11: 4, 12: 0, 13: 0}[attribute]
        return 0


def test_the_driver_is_asked_for_kernels_alone() -> None:
    expected = [KernelNode(GRID, BLOCK, (2, 1, 1)), KernelNode(GRID, BLOCK, (4, 1, 1))]
    assert clusters._nodes(Driver(), 12345) == expected


def test_the_drivers_structures_have_their_sizes() -> None:
    assert (ctypes.sizeof(clusters._Params), ctypes.sizeof(clusters._Attribute)) == (72, 64)
    assert clusters._Params.kern.offset == 56


def test_without_a_driver_what_was_seen_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_driver", lambda: None)
    assert with_clusters(lambda: pytest.fail("it was called"), [KERNEL]) == [KERNEL]


@pytest.mark.gpu
def test_a_plain_kernels_cluster_is_one_block() -> None:
    from flashmoe_science.measure.launches.trace import profile, profiler_works

    tensor = torch.ones(1 << 16, device="cuda")
    assert profiler_works(tensor.device, torch.cuda.synchronize) is None
    (seen,) = profile([lambda: tensor + 1], torch.cuda.synchronize)
    (launch,) = with_clusters(lambda: tensor + 1, seen)
    assert launch.cluster == (1, 1, 1)
    assert launch.model_copy(update={"cluster": None}) == seen[0]
