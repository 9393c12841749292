"""Scripts in Triton's interpreter, which needs a process of its own: one process, which forks for each script.

It imports PyTorch, Triton and the package once. Their import takes four seconds, longer than most scripts.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

FOLDER = Path(__file__).parent


class Interpreter:
    """Runs scripts of this folder. It is closed as a context."""

    def __init__(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, script: str, *arguments: str) -> Any:
        """What the script prints, from JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([script, *arguments]), file=self._process.stdin, flush=True)
        code, printed, complained = json.loads(self._process.stdout.readline())
        assert code == 0, complained[-2000:]
        return json.loads(printed)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def run(script: str, arguments: list[str], out: IO[str], err: IO[str]) -> NoReturn:
    """Run a script as Python would, in this process, and end the process."""
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    path = FOLDER / script
    sys.argv, code = [str(path), *arguments], 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def patch_the_language_once_a_launch() -> None:
    """Triton patches its language at each call of a device function, a third of most scripts' time, though the launch, or an
    earlier call from a module that imports the same, has done it."""
    from triton import language
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        seen = frozenset(id(one) for one in function.__globals__.values() if one is language or one is language.core)
        if seen in patched:
            return None
        patched.add(seen)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patch_once


def reduce_by_xor_at_once() -> None:
    """Triton calls the function of an xor for each element; a sort, which every routing has, took half of a script's time."""
    import numpy as np
    from triton.language import standard
    from triton.runtime.interpreter import ReduceOps

    apply = ReduceOps.apply_impl

    def applied(self: Any, given: Any) -> Any:
        if self.combine_fn is not standard._xor_combine:
            return apply(self, given)
        found = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, given[0].dtype)

    ReduceOps.apply_impl = applied


def compute_no_overflow_that_none_hears_of() -> None:
    """Triton asks after each sum of integers whether it overflowed, and asserts it only where it debugs."""
    from triton.runtime import interpreter

    interpreter.InterpreterOptions = partial(interpreter.InterpreterOptions, sanitize_overflow=False)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions()
    assert not interpreter.interpreter_builder.options.debug


def make_each_type_once() -> None:
    """Triton makes the type of a result, and the constexprs of its shape, at each operation: half of most scripts' time."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    make_type, make_tensor, numpys = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    in_numpy: dict[str, Any] = {}

    def type_made(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), tuple(getattr(one, "value", one) for one in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor_made(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[type.name], handle=handle, type=type, dtype=type.scalar)

    def numpy_s(given: Any) -> Any:
        if given.name not in in_numpy:
            in_numpy[given.name] = numpys(given)
        return in_numpy[given.name]

    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        first, second = one.type, other.type
        alike = first.is_block() and second.is_block() and first.shape.values == second.shape.values
        return (one, other) if alike else broadcast(self, one, other)

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = type_made, tensor_made, numpy_s
    semantic.TritonSemantic.broadcast_impl_value = broadcast_others


def main() -> None:
    gc.disable()  # as conftest.py has it
    import torch
    import torch._dynamo  # what a call with gradients, or under torch.compile, imports: a second

    from flashmoe_science.operations import OPERATIONS

    sys.path[0] = str(FOLDER.parents[1])  # scripts import what they share as the tests do
    torch.set_num_threads(1)  # a fork has no other threads
    patch_the_language_once_a_launch()
    reduce_by_xor_at_once()
    compute_no_overflow_that_none_hears_of()
    make_each_type_once()
    for one in OPERATIONS:
        one.contract(), one.kernels()
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        script, *arguments = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                run(script, arguments, out, err)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0), err.seek(0)
            print(json.dumps([code, out.read(), err.read()]), flush=True)


if __name__ == "__main__":
    main()
