"""Triton's compiler behind one call: source and target in; registers, spills, shared memory or a refusal out.

Needs Triton and the assembler that it brings, not a GPU nor a driver. Works with Triton 3.6 to 3.9. What Triton compiles is
kept in Triton's own cache on disk, so that a second build costs milliseconds.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmoe_science.hardware.gpus import WARP, Gpu

if TYPE_CHECKING:
    from flashmoe_science.kernel import CompileJob


_HASHED: set[int] = set()  # functions by ``id``: those of a module live as long as the process


class CompilerUnavailable(RuntimeError):
    """Nothing can be compiled here, and why: Triton is absent or set to interpret."""


class Refused(Exception):
    """The compiler or the assembler will not build a kernel; the message is their reason, in one line."""


def require_compiler() -> None:
    """Return where kernels can be compiled. Raises CompilerUnavailable: Triton cannot be imported, TRITON_INTERPRET is set, or
    Triton's cache cannot be written."""
    try:
        from triton import knobs
    except ImportError as error:
        raise CompilerUnavailable(f"compiling needs Triton, which cannot be imported here: {error}") from error
    if knobs.runtime.interpret:
        raise CompilerUnavailable("compiling is not possible with TRITON_INTERPRET=1; unset it")
    folder = knobs.cache.dir
    if not folder:
        raise CompilerUnavailable("compiling needs Triton's cache, and TRITON_CACHE_DIR is empty; name a folder, or unset it")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise CompilerUnavailable(
            f"compiling needs Triton's cache, {folder}, which cannot be written: {words}; set TRITON_CACHE_DIR"
        ) from error


def cache_folder() -> Path:
    """The folder where Triton keeps what it compiled."""
    from triton import knobs

    return Path(knobs.cache.dir)


def run_compiler(job: CompileJob, gpu: Gpu) -> Any:
    """Triton's CompiledKernel of ``job`` for ``gpu``; nothing is loaded onto a device. Raises Refused: the compiler or the
    assembler will not build it."""
    from triton.errors import TritonError

    with _kept_output() as printed:
        try:
            return _compile(job, gpu)
        # RuntimeError is what a failed pass of the compiler raises; its reason is only printed.
        except (TritonError, RuntimeError) as error:
            raise Refused(_reason(error, printed())) from error


def build_key(job: CompileJob, gpu: Gpu) -> Hashable:
    """Equal for jobs that are one build for ``gpu``, as a launch tells them apart (``JITFunction.run``)."""
    _, specialization, options = _specialized(job, _target(gpu))
    return job.function.fn, str(specialization), str(options)


def hash_callees_first(function: Any) -> None:
    """Have Triton hash what a kernel calls before the kernel: then its key on disk is the same in every process.

    Triton adds the globals of a called function to its caller's hash only where the called one was hashed before, by another
    kernel (``DependenciesFinder._update_hash`` of 3.6 to 3.9): processes missed each other's builds.
    """
    if id(function) in _HASHED or not (hasattr(function, "parse") and hasattr(type(function), "cache_key")):
        return
    _HASHED.add(id(function))
    for node in ast.walk(function.parse()):  # with annotations, which Triton follows too
        called = function.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        for one in vars(called).values() if isinstance(called, type) else (called,):
            hash_callees_first(one)
    function.cache_key  # noqa: B018  # Triton keeps it


def _target(gpu: Gpu) -> Any:
    """The GPU as Triton names it."""
    from triton.backends.compiler import GPUTarget

    major, minor = gpu.compute_capability
    # Triton itself turns 90 into sm_90a, 100 into sm_100a and so on.
    return GPUTarget("cuda", 10 * major + minor, WARP)


def _specialized(job: CompileJob, target: Any) -> Any:
    """(arguments by name, what a build is specialised on, options) of a job."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    specialize = create_function_from_signature(job.function.signature, job.function.params, make_backend(target))
    return specialize(*job.arguments, enable_fp_fusion=True, **job.options)


def _compile(job: CompileJob, gpu: Gpu) -> Any:
    """Compile as a launch does (``JITFunction.run``), for a target that no driver names."""
    import triton
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource  # public from Triton 3.9 on

    function, target = job.function, _target(gpu)
    hash_callees_first(function)
    bound, specialization, options = _specialized(job, target)
    options, *described = function._pack_args(make_backend(target), options, bound, specialization, options)
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, *described)
    return triton.compile(source, target=target, options=options.__dict__)


_USAGE = re.compile(r"^\s*Function \S+:\s*REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)", re.MULTILINE)


def cubin_resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers a thread, stack bytes a thread, shared bytes a block) that the assembler fixed in a binary.

    From sm_90 on, the shared bytes include the 1 KB that the system reserves in addition to each block's own. Raises
    RuntimeError: ``cuobjdump`` printed something else than is expected.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = _USAGE.search(printed)
    if usage is None:
        raise RuntimeError(f"cannot read registers and shared memory from what cuobjdump printed: {printed!r}")
    return int(usage["registers"]), int(usage["stack"]), int(usage["shared"])


@contextlib.contextmanager
def _kept_output() -> Iterator[Callable[[], str]]:
    """Keep what the compiler prints, and yield a function that returns it so far.

    Triton's C++ part writes to file descriptor 2, and its Python part prints whole programs when the assembler fails. After a
    refusal the one line that matters is its message; otherwise what was kept is passed on (a user's dump, a warning).
    """
    sys.stderr.flush()
    pass_on = True
    with tempfile.TemporaryFile() as kept, os.fdopen(os.dup(kept.fileno()), "w") as stream:

        def text() -> str:
            sys.stderr.flush()
            stream.flush()
            return os.pread(kept.fileno(), os.fstat(kept.fileno()).st_size, 0).decode(errors="replace")

        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            with contextlib.redirect_stdout(stream):
                yield text
        except Refused:
            pass_on = False
            raise
        finally:
            if pass_on:
                os.write(saved, text().encode())
            os.dup2(saved, 2)
            os.close(saved)


def _reason(error: Exception, printed: str) -> str:
    """The line of output with the reason: the assembler's, the compiler pass's, or the exception's own last one."""
    text = f"{error}\n{printed}"
    for pattern, who in ((r"ptxas (?:error|fatal)\s*:\s*(.+)", "assembler"), (r"\berror: (.+)", "compiler")):
        found = re.search(pattern, text)
        if found:
            return f"the {who} refuses it: {found[1].strip()}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"the compiler refuses it: {lines[-1] if lines else type(error).__name__}"
