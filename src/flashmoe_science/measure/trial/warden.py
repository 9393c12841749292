"""A child process that runs somebody's code, kept at arm's length: it may crash, hang, exit or lie, and the run goes on.

The two speak JSON, a line a message, over a pipe each way that is neither standard input nor output: a candidate may print. The
child lives in a session of its own and is killed with all that it started, in that session or out of it. What it prints is
kept, its last lines only, for the reason that a reader is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from flashmoe_science.measure.trial.kin import NAME, end_kin, new_mark
from flashmoe_science.measure.trial.wire import Commands, in_words

WATCHDOG_S = 60.0
_MOST_REPLY = 64 * 2**20  # bytes: samples and facts are far less
_SAID_LINES = 20
_GRACE_S = 5.0
_ILLEGAL = ", an illegal memory access"
_HINTS = {"SIGSEGV": _ILLEGAL, "SIGBUS": _ILLEGAL, "SIGKILL": ", killed from outside or for want of memory"}


class Failed(RuntimeError):
    """What the child was asked to do failed; the message says how. The child itself goes on."""


class Died(RuntimeError):
    """The child is gone: it crashed, ended itself, hung or spoke nonsense. The message says which."""


class Answers(Protocol):
    """Whoever can be asked: a child, or an object of this process that takes the same requests."""

    def ask(self, do: str, **what: Any) -> dict[str, Any]: ...


class Child(Answers, Protocol):
    """A child of which one can know how long its last answer took, and which files it may write."""

    folder: Path

    @property
    def last_wall_ns(self) -> int: ...


class Ward:
    """One child, running ``python -m module``, with a private folder for the bytes that it hands over."""

    def __init__(self, module: str, watchdog_s: float = WATCHDOG_S) -> None:
        self.watchdog_s = watchdog_s
        self._folder = tempfile.TemporaryDirectory(prefix="flashmoe-")
        self.folder = Path(self._folder.name)
        self._last_wall_ns = 0
        self.asked_ns = 0  # from requests to their answers, in all
        self.mark = new_mark()
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        self._pending = b""
        self._process = subprocess.Popen(
            # -P: no file of the working directory may stand in for the harness's own imports
            [sys.executable, "-P", "-m", module, str(child_reads), str(child_writes)],
            pass_fds=(child_reads, child_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, NAME: self.mark},
        )
        os.close(child_reads)
        os.close(child_writes)
        self._said: deque[bytes] = deque(maxlen=_SAID_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Have the child do something and wait for its answer.

        Raises:
            Failed: it could not; the child goes on.
            Died: the child is gone.
        """
        token = secrets.token_hex(8)
        request = json.dumps({"token": token, "do": do, "what": what}).encode() + b"\n"
        began = time.perf_counter_ns()
        try:
            os.write(self._write, request)
        except BrokenPipeError:
            raise self._died() from None
        line = self._line(time.monotonic() + self.watchdog_s)
        self._last_wall_ns = time.perf_counter_ns() - began
        self.asked_ns += self._last_wall_ns
        try:
            answer = _of_text(json.loads(line))
            said: dict[str, Any] = answer["said"]
            if answer["token"] != token or not isinstance(said, dict):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()
            raise Died("it wrote into the harness's own pipe") from None
        if "failed" in said:
            raise Failed(str(said["failed"])[:600])
        return said

    @property
    def last_wall_ns(self) -> int:
        """From sending the last request to having its answer, on this process's clock."""
        return self._last_wall_ns

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left))
            if not ready:
                self.close()
                raise Died(f"it hung: no answer within {self.watchdog_s:g} s")
            part = os.read(self._read, 2**16)
            if not part:
                raise self._died()
            self._pending += part
            if len(self._pending) > _MOST_REPLY:
                self.close()
                raise Died("it wrote into the harness's own pipe")
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _died(self) -> Died:
        """Why the child ended, from its exit status and the last thing that it printed."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            return Died("it closed the harness's pipes")
        if code >= 0:
            return Died(f"it ended the process with code {code} (os._exit or the like)")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        last = self.last_words()
        return Died(f"it crashed: {name}{_HINTS.get(name, '')}{f' ({last})' if last else ''}")

    def last_words(self) -> str:
        """The last line that the child printed, empty where it printed nothing."""
        lines = [text for line in self._said if (text := line.decode(errors="replace").strip())]
        return lines[-1][:200] if lines else ""

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed while reading
            while part := self._process.stdout.readline(4096):
                self._said.append(part)

    def close(self) -> None:
        """Kill the child and all that it started; remove its folder. May be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._write >= 0:
            end_kin(self.mark)
        self._process.wait()
        self._listener.join(_GRACE_S)
        if self._process.stdout is not None and not self._listener.is_alive():
            self._process.stdout.close()
        for end in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(end)
        self._read = self._write = -1
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._write >= 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _of_text(said: Any) -> Any:
    """The same JSON with ? for half characters, which escapes can spell and no file can hold."""
    return json.loads(json.dumps(said, ensure_ascii=False).encode(errors="replace"))


class InProcess:
    """Asks functions of this process, by name; what they raise becomes Failed."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._commands[do](**what)
        except Exception as error:
            raise Failed(in_words(error)) from error
        return answer
