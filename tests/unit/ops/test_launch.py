"""Direct launches: what a build is specialised on, what reaches the launcher, and that nothing of a tensor is kept."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.measure.guards import allocations
from flashmoe_science.ops import launch
from flashmoe_science.ops.launch import Build, Pointer, stride_class, stride_unit

META = {"swizzle": 0, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}


class Compiled:
    """What Triton's ``warmup`` returns, with the parts that a launch uses."""

    function, packed_metadata = "handle", "metadata"

    def __init__(self, started: list[tuple[Any, ...]], descriptors: int) -> None:
        self.metadata = SimpleNamespace(tensordesc_meta=[META | {"swizzle": index} for index in range(descriptors)])

        def start(*args: Any) -> None:
            started.append(args)

        self.run = SimpleNamespace(
            launch=start.__get__(self),
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )

    def _init_handles(self) -> None:
        pass


class Function:
    """A JIT function that compiles nothing."""

    def __init__(self, descriptors: int = 0) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.warmed: list[tuple[Any, ...]] = []
        self._descriptors = descriptors

    def warmup(self, *args: Any, **options: Any) -> Compiled:
        self.warmed.append(args)
        return Compiled(self.started, self._descriptors)


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


def test_a_launch_hands_over_the_grid_the_stream_and_the_arguments() -> None:
    function = Function()
    build = Build(function, (Pointer(torch.float16), 3))
    build.launch((5, 1, 1), 4096, 3)
    build.launch((6, 2, 1), 8192, 4)
    build.bound((7, 1, 3), 4)(12288)
    heads = [(args[1:5], args[-2:]) for args in function.started]
    assert heads == [((5, 1, 1, 77), (4096, 3)), ((6, 2, 1, 77), (8192, 4)), ((7, 1, 3, 77), (12288, 4))]
    assert len({len(args) for args in function.started}) == 1
    assert len(function.warmed) == 1


def test_a_pointer_says_its_dtype_and_its_alignment() -> None:
    memory = torch.zeros(64, dtype=torch.bfloat16)
    for offset in (0, 1, 8):
        tensor = memory[offset:]
        assert Pointer(tensor.dtype, tensor.data_ptr()).data_ptr() == tensor.data_ptr() % 16
    assert Pointer(torch.float32).data_ptr() == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((64, 128), (640, 16), True),
        ((0, 64), (64, 0), True),
        ((64, 8), (64, 24), True),
        ((64, 8), (64, 16), False),
        ((8, 64), (64, 8), False),
        ((64, 1), (64, 8), False),
        ((64, 2**31), (64, 2**30), False),
        ((64, 8), (2**40 + 8, 64), False),
    ],
)
def test_strides_share_a_build_where_triton_specialises_them_alike(
    one: tuple[int, ...], other: tuple[int, ...], same: bool
) -> None:
    assert (stride_class(one) == stride_class(other)) is same


@pytest.mark.parametrize(
    ("strides", "unit"),
    [
        ((704, 88, 61952), 8),
        ((100, 800, 0), 4),
        ((64, 6), 2),
        ((64, 7), 1),
        ((64, 2**40 + 8), 8),
        ((64, 128, 0), 1),  # multiples of 16, which Triton looks for
        ((0, 0), 1),
    ],
)
def test_the_unit_of_strides_is_the_power_of_two_that_triton_does_not_see(strides: tuple[int, ...], unit: int) -> None:
    assert stride_unit(strides) == unit


def template() -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], gl.float16)
    return TensorDescriptor(Pointer(torch.float16), [1, 1, 64, 64], [8, 8, 8, 1], [1, 1, 64, 64], layout)


SHAPE, STRIDES = (1, 2, 100, 64), (12800, 6400, 64, 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What Triton's C function was given for each map that it made; the map of a test is the word "map"."""
    pytest.importorskip("triton.backends.nvidia.driver")
    given: list[tuple[Any, ...]] = []

    def fill(*args: Any) -> str:
        given.append(args)
        return "map"

    utils = SimpleNamespace(fill_tma_descriptor=fill)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    return given


def test_a_map_is_encoded_once_an_address_and_says_the_tensors_own_sizes(made: list[tuple[Any, ...]]) -> None:
    build = Build(Function(descriptors=2), ())
    tensors = [torch.zeros(SHAPE, dtype=torch.float16) for _ in range(2)]
    encoder = build.encoder(1, template(), SHAPE, STRIDES)
    for tensor in (*tensors, *tensors):
        assert encoder(tensor) == ("map", *SHAPE, *STRIDES)
    assert made == [(tensor.data_ptr(), 1, 2, 9, [1, 1, 64, 64], SHAPE, STRIDES, 0) for tensor in tensors]
    longer = build.encoder(1, template(), (1, 2, 101, 64), STRIDES)
    assert longer(tensors[0]) == ("map", 1, 2, 101, 64, *STRIDES)


def test_a_map_is_made_as_triton_makes_it(made: list[tuple[Any, ...]]) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not triton.__version__.startswith("3.6."):
        pytest.skip("maps are only made here for Triton 3.6")
    tensor = torch.zeros(SHAPE, dtype=torch.float16)
    ours = Build(Function(descriptors=1), ()).encoder(0, template(), SHAPE, STRIDES)(tensor)
    descriptor = TensorDescriptor(tensor, list(SHAPE), list(STRIDES), [1, 1, 64, 64], template().layout)
    assert ours == tuple(driver.make_tensordesc_arg(descriptor, META))
    one, other = ([list(part) if isinstance(part, tuple) else part for part in args] for args in made)
    assert one == other


@pytest.mark.usefixtures("made")
def test_maps_are_bounded_and_hold_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch._MAPS, "max_entries", 8)
    build = Build(Function(descriptors=1), ())
    alive = []
    for rows in range(1, 40):
        tensor = torch.zeros(1, 2, rows, 64, dtype=torch.float16)
        build.encoder(0, template(), tuple(tensor.shape), tensor.stride())(tensor)
        alive.append(weakref.ref(tensor))
        assert len(launch._MAPS) <= 8
    del tensor
    gc.collect()
    assert [one for one in alive if one() is not None] == []


def test_other_versions_of_triton_are_given_a_descriptor_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DIRECT", False)
    assert "Python wrappers of Triton" in str(launch.launch_path())
    build = Build(Function(descriptors=1), ())
    tensor = torch.zeros(SHAPE, dtype=torch.float16)
    (descriptor,) = build.encoder(0, template(), SHAPE, STRIDES)(tensor)
    assert isinstance(descriptor, TensorDescriptor)
    assert descriptor.base is tensor
    assert (descriptor.shape, descriptor.strides) == (list(SHAPE), list(STRIDES))
    assert isinstance(template().base, Pointer)


def test_what_stands_between_launches_is_one_allocation_and_one_each_where_a_mode_looks() -> None:
    parts = ((700, torch.int32), (1000, torch.bfloat16), (33, torch.bfloat16))
    take = launch.workspace_allocator(False, parts)
    held, *addresses = take()
    assert held.numel() == launch.workspace_bytes(parts) == 2816 + 2048 + 256
    assert [one - held.data_ptr() for one in addresses] == [0, 2816, 2816 + 2048]
    with allocations(True):
        held, *addresses = take()
    assert [one.numel() for one in held] == [700, 1000, 33]
    assert [one.data_ptr() for one in held] == addresses
    assert held[1].isnan().all()  # the memory was filled by the mode


def test_collected_builds_compile_nothing_and_are_not_kept() -> None:
    function, arguments = Function(), (Pointer(torch.bfloat16), 2)
    for _ in range(2):
        with launch.collect_builds(GPUS["h200"]) as jobs:
            assert launch.can_start_early(torch.device("meta"))
            launch.kept_build("key", function, arguments, num_warps=2)
        assert [(job.function, job.arguments, job.options["num_warps"]) for job in jobs] == [(function, arguments, 2)]
    assert function.warmed == []
    assert (function, "key") not in launch._BUILDS
