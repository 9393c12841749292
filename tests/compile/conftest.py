"""The machine code of what is built here is held to the committed digests; with `--write-digests` those are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine_code
import mbarriers
import pytest
import uniform_registers

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.target import Build, compile_for
from flashmoe_science.kernel import CompileJob

OPTION = "--write-digests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="write the digests of the machine code that is built")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(OPTION, default=False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer())


class Writer:
    """Writes, in the one process that hears of every test, what all of them found."""

    def __init__(self) -> None:
        self.found: dict[machine_code.Name, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "digest":
                *build, digest = value  # type: ignore[misc]
                self.found[machine_code.Name(*build)] = digest

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        option, folder = session.config.option, Path(__file__).parent
        chosen = option.markexpr or option.keyword or [*map(Path.resolve, map(Path, session.config.args))] != [folder]
        machine_code.write(self.found, whole=exitstatus == 0 and not chosen)


@pytest.fixture
def hold(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """Holds PTX to the digest that is committed for a kernel, a device function, a GPU, a problem and a config."""

    def held(ptx: str, *names: object) -> None:
        name, digest = machine_code.Name(*map(str, names)), machine_code.digest(ptx)
        record_property("digest", [*name, digest])
        if not request.config.getoption(OPTION, default=False):
            machine_code.hold(name, digest)

    return held


@pytest.fixture
def compiled(hold: Callable[..., None], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compiles a job for a GPU and holds it to its digest: by the kernel's name, the problem, the config.

    Where a digest is written, what has wgmma reads no register that the assembler left unwritten: half a second a build.
    """

    def compile_it(job: CompileJob, gpu: Gpu, kernel: str, problem: object, config: object) -> Any:
        found = run_compiler(job, gpu)
        assert mbarriers.reused(found.asm["ptx"]) == set()
        if request.config.getoption(OPTION, default=False) and "wgmma" in found.asm["ptx"]:
            assert uniform_registers.unwritten(found.asm["cubin"]) == []
        hold(found.asm["ptx"], kernel, job.function.__name__, gpu.name, problem, config)
        return found

    return compile_it


@pytest.fixture
def built(compiled: Callable[..., Any]) -> Callable[..., Build]:
    """Builds what ``compiled`` compiles, and says what it takes."""

    def build(job: CompileJob, gpu: Gpu, *names: object) -> Build:
        found = compile_for(job, gpu)
        if found.refusal is None:
            compiled(job, gpu, *names)
        return found

    return build
