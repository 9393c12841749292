"""A kernel's key in Triton's cache on disk is the same in every process, whatever was hashed before it there."""

from __future__ import annotations

import os
import subprocess
import sys

_KEYS = """
import importlib, pkgutil, sys
import flashmoe_science.ops as ops
from flashmoe_science.hardware.compiler import hash_callees_first
from triton.runtime.jit import JITCallable
found = {}
for module in pkgutil.walk_packages(ops.__path__, ops.__name__ + "."):
    found |= {name: one for name, one in vars(importlib.import_module(module.name)).items() if isinstance(one, JITCallable)}
kernels = [name for name in found if name.startswith("flashmoe_")]
for name in ([name for name in found if name not in kernels] if sys.argv[1] == "functions first" else []) + kernels:
    hash_callees_first(found[name])
if sys.argv[1] == "globals":
    for kernel in kernels:
        found[kernel].cache_key
        values = {}
        for (name, _), (value, _) in found[kernel].used_global_vals.items():
            if values.setdefault(name, str(value)) != str(value):
                print(kernel, name)
    sys.exit()
print(*(f"{name} {found[name].cache_key}" for name in kernels), sep="\\n")
"""


def keys(order: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", _KEYS, order]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def test_what_was_hashed_before_is_not_in_a_kernels_key() -> None:
    found = keys("kernels")
    assert found.count("\n") > 30
    assert found == keys("functions first")


def test_no_kernel_reads_two_globals_of_one_name() -> None:
    """Triton hashes globals in the order of their names, then of their modules' addresses: two values would change places."""
    assert keys("globals") == ""
