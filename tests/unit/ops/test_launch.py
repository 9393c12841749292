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
from flashmoe_science.ops import direct, launch, private
from flashmoe_science.ops.launch import Build, Pointer, stride_class, stride_unit

STARTED: list[tuple[Any, ...]] = []  # what the C function for all kernels was given
META = {"swizzle": 0, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}


class Compiled:
    """What Triton's ``warmup`` returns, with the parts that a launch uses."""

    hash = "digest"

    def __init__(self, started: list[tuple[Any, ...]], descriptors: int, scratch: int) -> None:
        self.function, self.packed_metadata = "handle", "packed"
        self.metadata = SimpleNamespace(tensordesc_meta=[META | {"swizzle": index} for index in range(descriptors)])
        self.launch_metadata = lambda grid, stream, *args: (grid, stream, args)
        self.by_python: list[tuple[Any, ...]] = []
        self.run = SimpleNamespace(
            launch=lambda *args: started.append(args),
            arg_annotations="annotations",
            kernel_signature="signature",
            global_scratch_size=scratch,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )
        if direct._FOR_EACH_KERNEL:  # as Triton 3.6 wraps it to encode descriptors
            launcher = self.run.launch
            self.run.launch = lambda *args: launcher(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.by_python.append((grid, *args))


class Function:
    """A JIT function that compiles nothing."""

    __name__ = "function"

    def __init__(self, descriptors: int = 0, scratch: int = 0) -> None:
        self.fn = self
        self.started: list[tuple[Any, ...]] = []
        self.warmed: list[tuple[Any, ...]] = []
        self.compiled = Compiled(self.started, descriptors, scratch)

    def warmup(self, *args: Any, **options: Any) -> Compiled:
        self.warmed.append(args)
        return self.compiled


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What Triton's C function was given for each map that it made; the map of a test is the word "map"."""
    pytest.importorskip("triton.backends.nvidia.driver")
    given: list[tuple[Any, ...]] = []

    def fill(*args: Any) -> str:
        given.append(args)
        return "map"

    def start(*args: Any) -> None:
        STARTED.append(args)

    STARTED.clear()
    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill, launch=start)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr(triton.knobs, "runtime", SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None))
    monkeypatch.setattr(launch, "_WRAPPED", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return given


@pytest.fixture(params=[True, False], ids=["3.6", "3.7 to 3.9"])
def for_each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether each kernel has a C function of its own, as in Triton 3.6."""
    monkeypatch.setattr(direct, "_FOR_EACH_KERNEL", request.param)
    return bool(request.param)


def handed_over(function: Function, for_each_kernel: bool) -> list[tuple[Any, ...]]:
    """Of each launch the grid, the stream, metadata and hooks, the arguments. The rest is that of Triton's own Python."""
    if for_each_kernel:
        assert {args[4:10] for args in function.started} == {("handle", False, True, None, None, "packed")}
        return [(args[:3], args[3], args[10:13], args[13:]) for args in function.started]
    assert {(args[4:8], args[11:15]) for args in STARTED} == {
        (("handle", False, True, "packed"), (None, None, "annotations", "signature"))
    }
    return [(args[:3], args[3], args[8:11], *args[15:]) for args in STARTED]


def test_a_kernel_that_is_built_again_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LOADED", set())
    Build(Function(), ())
    assert (Build(Function(), ()) is not None, launch.kernels_loaded()) == (True, 1)


def test_a_launch_hands_over_the_grid_the_stream_and_the_arguments(for_each_kernel: bool) -> None:
    function = Function()
    build = Build(function, (Pointer(torch.float16), 3))
    build.launch((5, 1, 1), 4096, 3)
    build.launch((6, 2, 1), 8192, 4)
    build.bound((7, 1, 3), 4)(12288)
    assert handed_over(function, for_each_kernel) == [
        ((5, 1, 1), 77, (None, None, None), (4096, 3)),
        ((6, 2, 1), 77, (None, None, None), (8192, 4)),
        ((7, 1, 3), 77, (None, None, None), (12288, 4)),
    ]
    assert len(function.warmed) == 1
    assert launch.launch_path() is None


def test_a_profilers_hooks_are_handed_over_from_when_it_starts(for_each_kernel: bool) -> None:
    function = Function()
    build = Build(function, ())
    begin = build.bound((7, 1, 3), 4)
    for hook in (SimpleNamespace(calls=[]), SimpleNamespace(calls=["a profiler"])):
        triton.knobs.runtime.launch_enter_hook = hook
        begin(5)
        build.launch((7, 1, 3), 5, 4)
    seen = (((7, 1, 3), 77, (5, 4)), hook, None)
    found = [hooks for _, _, hooks, _ in handed_over(function, for_each_kernel)]
    assert found == [(None, None, None)] * 2 + [seen] * 2


# Of what is looked up when a kernel is built: where a name is gone, and in which Tritons it is used.
NAMES = {
    **{f"run.{name}": (True, False) for name in ("global_scratch_size", "launch_cooperative_grid", "launch_pdl")},
    **{f"run.{name}": (False,) for name in ("arg_annotations", "kernel_signature")},
    **dict.fromkeys(("function", "packed_metadata", "launch_metadata", "metadata.tensordesc_meta"), (True, False)),
    "run.launch": (True,),
    "utils.launch": (False,),
    "utils.fill_tma_descriptor": (True,),
    "utils.fill_tma_descriptor_tiled": (False,),
    "hooks.launch_enter_hook": (True, False),
    "TMA_DTYPE_DEVICE_TO_HOST": (True, False),
}


@pytest.mark.parametrize("name", NAMES)
def test_where_a_name_of_triton_is_gone_its_python_launches_after_one_warning(
    name: str, for_each_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if for_each_kernel not in NAMES[name]:
        pytest.skip("that Triton has no such name")
    function = Function(descriptors=1)
    utils = triton.runtime.driver.active.utils
    owners = {
        "utils": utils,
        "hooks": triton.knobs.runtime,
        "run": function.compiled.run,
        "metadata": function.compiled.metadata,
    }
    owner, _, attribute = name.rpartition(".")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.delattr(driver if name.isupper() else owners.get(owner, function.compiled), attribute)
    monkeypatch.setattr(private, "_WARNED", set())
    with pytest.warns(RuntimeWarning, match=f"a private name of Triton .*{attribute}.* is gone: its Python launches") as warned:
        builds = [Build(function, ()) for _ in range(2)]
    assert len(warned) == 1
    assert "launched by the Python of Triton" in str(launch.launch_path())
    builds[0].launch((5, 1, 1), 4096)
    builds[1].bound((7, 1, 3), 4)(12288)
    assert function.compiled.by_python == [((5, 1, 1), 4096), ((7, 1, 3), 12288, 4)]


def test_a_kernel_that_needs_scratch_memory_is_launched_by_triton_without_a_warning(for_each_kernel: bool) -> None:
    function = Function(scratch=8)
    Build(function, ()).launch((5, 1, 1), 4096)
    assert function.compiled.by_python == [((5, 1, 1), 4096)]


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
    tensor = torch.zeros(SHAPE, dtype=torch.float16)
    ours = Build(Function(descriptors=1), ()).encoder(0, template(), SHAPE, STRIDES)(tensor)
    descriptor = TensorDescriptor(tensor, list(SHAPE), list(STRIDES), [1, 1, 64, 64], template().layout)
    more = () if triton.__version__.startswith(("3.6.", "3.7.")) else (None,)
    assert ours == tuple(driver.make_tensordesc_arg(descriptor, META, *more))
    one, other = ([list(part) if isinstance(part, tuple) else part for part in args] for args in made)
    assert one == other


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


def test_tritons_python_is_given_a_descriptor_of_the_address() -> None:
    build = Build(Function(descriptors=1, scratch=8), ())
    tensor = torch.zeros(SHAPE, dtype=torch.float16)
    for given in (tensor, tensor.data_ptr()):
        (descriptor,) = build.encoder(0, template(), SHAPE, STRIDES)(given)
        assert isinstance(descriptor, TensorDescriptor)
        assert descriptor.base.data_ptr() == tensor.data_ptr()
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
