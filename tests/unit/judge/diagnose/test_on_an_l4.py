"""A first attention kernel on an L4, whose times were once misread: the diagnosis reads them right, without any counter."""

from __future__ import annotations

from tests.unit.judge.diagnose.planted import Plant, causes

from flashmoe_science.judge.diagnose.diagnosis import diagnose
from flashmoe_science.store import Run

S128 = "attn b1 h1 q128 d64 fp16"


def sweep() -> Run:
    """One batch and head over S: the kernel beside PyTorch's, whose own kernels take a fraction of a flat call."""
    run = Plant("l4")
    for seqlen, theirs, sdpa in ((64, 278, 25), (128, 543, 24), (256, 1073, 24)):
        problem = f"attn b1 h1 q{seqlen} d64 fp16"
        run.time(problem, "v1", theirs, "eager", "sdpa", sdpa)
        run.time(problem, "v1", theirs - 5, "graph", "sdpa", 7)
        run.launch(problem, "v1", (1, 1, seqlen // 64), 256, 40960)
    return run.done()


def test_two_blocks_on_a_gpu_of_58_sms() -> None:
    found = causes(diagnose([sweep()], S128, "v1"))["small-grid"]
    assert found.status == "supported"
    assert found.evidence == "2 blocks on 58 SMs: 96.6% of the GPU gets no work"


def test_256_threads_of_which_64_work() -> None:
    found = causes(diagnose([sweep()], S128, "v1"))["idle-threads"]
    assert found.status == "supported"
    assert "25% of the threads work" in found.change.how
    assert "64 query rows for its 256 threads" in found.evidence


def test_a_flat_baseline_is_the_hosts_floor() -> None:
    found = causes(diagnose([sweep()], S128, "v1"))
    assert found["rival-floor"].status == "supported"
    assert found["rival-floor"].evidence == "a call takes 24 us, its kernels 7 us of device time"
    assert found["host-bound"].status == "ruled out"  # their own kernel's time is not the host's
    assert causes(diagnose([sweep()], S128, "sdpa"))["host-bound"].status == "supported"


def test_under_half_a_tflops_is_not_memory_bound() -> None:
    """1.07 GFLOP in 0.318 ms, 4.2 MB of unique traffic: neither memory nor arithmetic; latency and occupancy."""
    problem = "attn b2 h8 q512 d64 fp16"
    run = Plant("l4").time(problem, "v2", 318).launch(problem, "v2", (16, 16, 1), 128, 24576).done()
    diagnosed = diagnose([run], problem, "v2")
    found = causes(diagnosed)
    assert found["dram-bound"].status == "ruled out"
    assert found["tensor-bound"].status == "ruled out"
    assert found["latency-bound"].status == "supported"
    assert "warps on an SM in use" in found["latency-bound"].evidence
    assert found["no-tensor-cores"].status == "untested"
    assert "3.38 TFLOP/s" in found["no-tensor-cores"].evidence
    assert "latency bound" in diagnosed.cause
    assert "memory bound" not in diagnosed.cause


def test_a_tile_of_160_kb_fits_no_l4() -> None:
    reason = "it does not run: out of resource: shared memory, Required: 163840"
    run = Plant("l4").refused("callpath", reason, "v0", S128).done()
    found = causes(diagnose([run], S128, "v0"))["shared-tile"]
    assert found.status == "supported"
    assert "163840" in found.evidence
    assert diagnose([run], S128, "v0").as_dict()["refusals"] == [found.evidence]
