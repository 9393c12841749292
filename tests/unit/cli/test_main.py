"""The command line as a user meets it: help that teaches, one line where something is wrong, and the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import pytest
import typer

from flashmoe_science.cli import main as cli

Call = Callable[[Callable[[], int | None]], int]


def flashmoe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flashmoe_science", *arguments], capture_output=True, text=True, timeout=120)


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_each_command_helps_with_an_example(command: str) -> None:
    done = flashmoe(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: flashmoe {command} ")
    assert f"  flashmoe {command}" in done.stdout.partition("xample")[2]
    assert "\b" not in done.stdout


def test_root_help_lists_every_command_with_words() -> None:
    done = flashmoe("--help")
    assert done.returncode == 0, done.stderr
    listed = [line.split(maxsplit=1) for line in done.stdout.partition("Commands:\n")[2].splitlines() if line.strip()]
    told = {words[0]: words[1] for words in listed if len(words) == 2}
    assert set(cli.COMMANDS) <= set(told)


def test_without_arguments_it_prints_help() -> None:
    done = flashmoe()
    assert done.returncode == 0
    assert done.stdout == flashmoe("--help").stdout


def test_version_is_the_installed_one() -> None:
    assert flashmoe("--version").stdout == f"flashmoe {version('flashmoe-science')}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["provee"], "provee"),
        (["--nonsense"], "--nonsense"),
        (["prove", "no-such-suite"], "no-such-suite"),
        (["prove", "cpu", "--kernel", "no-such-kernel"], "no-such-kernel"),
        (["prove", "attn b1 h1 q128"], "d<n>"),
        (["explain", "attn b1 h1 q128 d64 bf16", "--gpu", "no-such-gpu"], "no-such-gpu"),
        (["explain", "attn b1 h1 q128 d64 bf17"], "bf17"),
        (["explain"], "Missing argument"),
        (["fit", "--gpu", "no-such-gpu"], "no-such-gpu"),
        (["fit", "no-such-kernel", "--gpu", "l4"], "no-such-kernel"),
        (["verdicts", "--gpu", "no-such-gpu"], "no-such-gpu"),
        (["verdicts", "--suite", "no-such-suite"], "no-such-suite"),
        (["verdicts", "--evidence", "no/such/folder"], "no/such/folder"),
        (["report", "--evidence", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_wrong_input_is_one_line_and_exit_2(arguments: list[str], told: str) -> None:
    done = flashmoe(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("flashmoe: ")
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


def test_help_comes_at_once_and_without_the_heavy_modules() -> None:
    code = (
        "import sys; from flashmoe_science.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'triton', 'scipy', 'numpy', 'jinja2'} & set(sys.modules)), file=sys.stderr)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert time.monotonic() - started < 2.0  # 0.3 s alone; other tests run beside this one


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

    def test_a_returned_number_is_the_code(self, call: Call) -> None:
        assert call(lambda: 3) == 3

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


def test_letters_that_the_encoding_lacks_are_written_out() -> None:
    code = "import typer; from flashmoe_science.cli import main as cli; cli.COMMANDS['p'] = '__main__:p'\n"
    code += "def p() -> None: typer.echo('h \\u65e5')\ncli.main(['p'])"
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "h \\u65e5\n", "")
