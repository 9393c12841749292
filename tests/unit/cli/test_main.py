"""The command line as a user meets it: help that teaches, one line where something is wrong, and the exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
import typer

from flashmoe_science.cli import main as cli

Call = Callable[[Callable[[], int | None]], int]
Flashmoe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def flashmoe(capsys: pytest.CaptureFixture[str]) -> Flashmoe:
    """The command in this process: its exit code, what it printed and what it complained."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(list(arguments))
        return int(stopped.value.code or 0), *capsys.readouterr()

    return run


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


def test_help_lists_every_command_and_comes_without_the_heavy_modules() -> None:
    code = (
        "import sys; from flashmoe_science.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'triton', 'scipy', 'numpy', 'jinja2'} & set(sys.modules)), file=sys.stderr)"
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
            monkeypatch.setattr(sys.modules[__name__], "planted", command, raising=False)
            monkeypatch.setitem(cli.COMMANDS, "planted", f"{__name__}:planted")
            with pytest.raises(SystemExit) as stopped:
                cli.main(["planted"])
            assert isinstance(stopped.value.code, int)
            return stopped.value.code

        return run

    @pytest.mark.parametrize("code", [0, 1, 3])
    def test_the_commands_own_code_is_kept(self, call: Call, code: int) -> None:
        assert call(raising(typer.Exit(code))) == code

    @pytest.mark.parametrize("error", [ValueError("gpu is 'x';\nit must be y"), PermissionError("gpu is 'x'; it must be y")])
    def test_a_users_error_is_one_line(self, call: Call, error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(raising(error)) == 2
        assert capsys.readouterr().err == "flashmoe: gpu is 'x'; it must be y\n"

    def test_a_defect_of_ours_keeps_its_traceback(self, call: Call) -> None:
        with pytest.raises(KeyError, match="ours"):
            call(raising(KeyError("ours")))

    def test_the_traceback_can_be_asked_for(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLASHMOE_TRACEBACK", "1")
        with pytest.raises(ValueError, match="gpu is 'x'"):
            call(raising(ValueError("gpu is 'x'")))

    def test_interruption_is_130(self, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(raising(KeyboardInterrupt())) == 130
        assert capsys.readouterr().err.strip() == "flashmoe: interrupted"

    def test_what_a_terminal_would_obey_is_not_repeated_to_it(self, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(raising(ValueError("file is 'a\x1b]0;mine\x07'"))) == 2
        assert capsys.readouterr().err == "flashmoe: file is 'a\\x1b]0;mine\\x07'\n"

    def test_what_the_system_says_is_told_in_words(self, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
        assert call(raising(OSError(28, "No space left on device"))) == 2
        assert call(raising(FileNotFoundError(2, "No such file or directory", "runs"))) == 2
        assert capsys.readouterr().err == "flashmoe: no space left on device\nflashmoe: no such file or directory: runs\n"

    def test_a_reader_that_has_had_enough_is_no_failed_claim(self, call: Call, capfd: pytest.CaptureFixture[str]) -> None:
        assert call(raising(BrokenPipeError(32, "Broken pipe"))) == 141
        assert capfd.readouterr().err == ""
