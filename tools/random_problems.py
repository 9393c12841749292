"""Random problems of all features of attention and their combinations on this GPU, each checked as the exam checks it.

    python tools/random_problems.py --out FILE [--seconds 120] [--jobs 14] [--first NUMBER] [--kernel NAME ...]

Kernels are of the forward, by default all, or of the backward. A case is drawn from its number alone
(tests/unit/ops/attention/forward/random_features.py and backward/random_problems.py), so that FILE says all that was run: the
first number, how many were served, how many were right by kernel and by mode, and each that was wrong in words.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KERNELS = ("split_triton", "decode_gluon", "chunk_gluon_sm90", "fwd_gluon_sm90", "fp32_gluon_sm90", "fwd_triton", "short_gluon")
BACKWARD = ("bwd_gluon_sm90", "bwd_fused_gluon_sm90", "bwd_triton", "bwd_short_triton")
ROOT = Path(__file__).resolve().parent.parent


def worker(place: int, first: int, jobs: int, seconds: float, kernels: Sequence[str]) -> dict[str, Any]:
    """Cases from ``first`` on, of one build in ``jobs``, by each of the kernels that serves them, until the time is over."""
    sys.path.insert(0, str(ROOT))
    import torch
    from tests.unit.ops.attention.backward import random_problems as backward
    from tests.unit.ops.attention.forward import random_features as forward

    from flashmoe_science.hardware.probe import current_gpu
    from flashmoe_science.operations import kernel_named

    gpu, cuda = current_gpu(), torch.device("cuda")
    if gpu is None:
        sys.exit("no GPU is visible; these cases are for the kernels on one")
    until = time.monotonic() + seconds
    of_a_build = forward.OF_A_BUILD
    begins = itertools.count(first + place * of_a_build, jobs * of_a_build)
    numbers = (begin + n for begin in begins for n in range(of_a_build))
    in_time = itertools.takewhile(lambda _: time.monotonic() < until, numbers)
    if set(kernels) <= set(BACKWARD):
        return dict(vars(backward.tried([kernel_named(name, "attention_backward") for name in kernels], in_time, gpu, cuda)))
    return dict(vars(forward.tried([kernel_named(name) for name in kernels], in_time, gpu, cuda)))


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums of what the processes found."""
    right: Counter[str] = Counter()
    features: Counter[str] = Counter()
    for part in parts:
        right.update(part["right"])
        features.update(part["features"])
    return {
        "cases": sum(part["cases"] for part in parts),
        "right": dict(sorted(right.items())),
        "right_by_feature": dict(sorted(features.items())),
        "wrong": [text for part in parts for text in part["wrong"]],
        "processes_that_failed": [part["failed"] for part in parts if "failed" in part],
    }


def measure(first: int, jobs: int, seconds: float, kernels: Sequence[str]) -> dict[str, Any]:
    """The results of ``jobs`` processes in parallel."""
    options = f"--jobs {jobs} --seconds {seconds} --first {first} --kernel".split()
    own = [sys.executable, __file__, *options, *kernels]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    asked = [[*own, "--worker", str(place)] for place in range(jobs)]
    started = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for one in asked]
    parts = []
    for one in started:
        out, error = one.communicate()
        failed = {"cases": 0, "right": {}, "features": {}, "wrong": [], "failed": error[-400:]}
        parts.append(json.loads(out.splitlines()[-1]) if one.returncode == 0 else failed)
    return {"first": first} | together(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--first", type=int, default=random.randrange(2**31))
    parser.add_argument("--kernel", nargs="+", choices=(*KERNELS, *BACKWARD), default=KERNELS, help="all of one pass")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    of_all = (arguments.first, arguments.jobs, arguments.seconds, arguments.kernel)
    if arguments.worker is not None:
        print(json.dumps(worker(arguments.worker, *of_all)))
        return 0
    found = measure(*of_all)
    if arguments.out is not None:
        from record import write_record

        write_record(arguments.out, found)
    print(f"first {found['first']}, {found['cases']} cases, right: {found['right']}, by feature: {found['right_by_feature']}")
    bad = (*found["wrong"], *found["processes_that_failed"])
    print("\n".join(text[:300] for text in bad) or "none was wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
