"""The command line as a user meets it: help that teaches, one line where something is wrong, and the exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import typer

from flashmoe_science.cli import main as cli

Call = Callable[[Callable[[], int | None]], int]
Flashmoe = Callable[..., tuple[int, str, str]]


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_each_command_helps_with_an_example(command: str, flashmoe: Flashmoe) -> None:
    code, out, _ = flashmoe(command, "--help")
    assert code == 0
    assert out.startswith(f"Usage: flashmoe {command} ")
    assert f"  flashmoe {command}" in out.partition("xample")[2]
    assert "\b" not in out


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_fits_80_columns(command: str, flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = flashmoe(*filter(None, (command, "--help")))
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_help_lists_every_command_and_comes_without_the_heavy_modules() -> None:
    code = (
        "import sys; from flashmoe_science.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'triton', 'scipy', 'numpy', 'jinja2', 'pydantic'} & set(sys.modules)), file=sys.stderr)"
    )
    with_help, without = (
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True) for words in (["--help"], [])
    )
    assert (with_help.stderr.strip(), without.stdout) == ("[]", with_help.stdout)
    listed = [line.split(maxsplit=1) for line in with_help.stdout.partition("Commands:\n")[2].splitlines() if line.strip()]
    assert set(cli.COMMANDS) <= {words[0] for words in listed if len(words) == 2}


def test_version_is_the_installed_one(flashmoe: Flashmoe) -> None:
    assert flashmoe("--version")[1] == f"flashmoe {version('flashmoe-science')}\n"


class TestOutcomes:
    """Exit codes and words, with a planted command."""

    @pytest.fixture
    def call(self, monkeypatch: pytest.MonkeyPatch) -> Call:
        def run(command: Callable[[], int | None]) -> int:
            monkeypatch.setitem(sys.modules, "flashmoe_science.cli.planted", SimpleNamespace(planted=command))
            monkeypatch.setitem(cli.COMMANDS, "planted", "")
            with pytest.raises(SystemExit) as stopped:
                cli.main(["planted"])
            assert isinstance(stopped.value.code, int)
            return stopped.value.code

        return run

    @pytest.mark.parametrize("code", [0, 1, 3])
    def test_the_commands_own_code_is_kept(self, call: Call, code: int) -> None:
        assert call(raising(typer.Exit(code))) == code

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (ValueError("gpu is 'x';\nit must be y"), 2, "flashmoe: gpu is 'x'; it must be y"),
            (PermissionError("gpu is 'x'; it must be y"), 2, "flashmoe: gpu is 'x'; it must be y"),
            (ValueError("file is 'a\x1b]0;mine\x07'"), 2, "flashmoe: file is 'a\\x1b]0;mine\\x07'"),
            (OSError(28, "No space left on device"), 2, "flashmoe: no space left on device"),
            (FileNotFoundError(2, "No such file or directory", "runs"), 2, "flashmoe: no such file or directory: runs"),
            (KeyboardInterrupt(), 130, "flashmoe: interrupted"),
            (BrokenPipeError(32, "Broken pipe"), 141, ""),  # a reader that has had enough
        ],
    )
    def test_what_is_no_defect_of_ours_is_one_line(
        self, call: Call, error: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert call(raising(error)) == code
        assert capfd.readouterr().err.strip() == said

    def test_a_defect_of_ours_keeps_its_traceback(self, call: Call) -> None:
        with pytest.raises(KeyError, match="ours"):
            call(raising(KeyError("ours")))

    def test_the_traceback_can_be_asked_for(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLASHMOE_TRACEBACK", "1")
        with pytest.raises(ValueError, match="gpu is 'x'"):
            call(raising(ValueError("gpu is 'x'")))
