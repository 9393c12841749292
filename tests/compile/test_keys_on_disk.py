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
