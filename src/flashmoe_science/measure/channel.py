"""How a worker is asked: by a function call in this process, or over pipes in a child that may crash, hang, exit or lie.

A child speaks JSON, a line a message, over a pipe each way that is neither standard input nor output: its code may print. It
lives in a session of its own and is killed with all that it started, in that session or out of it. The last lines that it
prints are kept for the reason that a reader is given. ``child.serve`` is the child's end.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flashmoe_science.measure.child import Commands, in_words
from flashmoe_science.measure.sandbox.processes import MARK_VARIABLE, end_marked
from flashmoe_science.measure.worker.worker import MODULE as WORKER
from flashmoe_science.problem import Problem

WATCHDOG_S = 60.0
_MOST_REPLY = 64 * 2**20  # bytes: samples and facts are far less
_LAST_LINES = 20
_GRACE_S = 5.0
_ILLEGAL = ", an illegal memory access"
_HINTS = {"SIGSEGV": _ILLEGAL, "SIGBUS": _ILLEGAL, "SIGKILL": ", killed from outside or for want of memory"}


class Failed(RuntimeError):
    """What the worker was asked to do failed; the message says how. The worker itself goes on."""

    @property
    def cannot_serve(self) -> str | None:
        """The reason in words where a kernel said that it cannot serve these tensors; None for any other failure."""
        kind, _, reason = str(self).partition(": ")
        return reason if kind == "CannotServe" else None


class Died(RuntimeError):
    """The child is gone: it crashed, ended itself, hung or spoke nonsense. The message says which."""


class Hung(Died):
    """It gave no answer within the watchdog's time."""


class Asked(Protocol):
    """Whatever takes requests: a worker or an oracle, in this process or another."""

    def ask(self, do: str, **what: Any) -> dict[str, Any]: ...


class InProcess:
    """Asks functions of this process, by name; what they raise becomes Failed."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.folder = Path(f"in-process-{id(self)}")  # the names under which tensors are handed over; nothing is written there
        self.last_wall_ns = 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        began = time.perf_counter_ns()
        try:
            answer: dict[str, Any] = self._commands[do](**what)
        except Exception as error:
            raise Failed(in_words(error)) from error
        self.last_wall_ns = time.perf_counter_ns() - began
        return answer


class Child:
    """One child, running ``python -m module``, with a private folder for the bytes that it hands over."""

    def __init__(self, module: str, watchdog_s: float = WATCHDOG_S, settings: Mapping[str, str] | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._folder = tempfile.TemporaryDirectory(prefix="flashmoe-")
        self.folder = Path(self._folder.name)
        self.last_wall_ns = 0  # from sending the last request to having its answer, on this process's clock
        self.asked_ns = 0  # from requests to their answers, in all
        self.mark = secrets.token_hex(8)
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        self._pending = b""
        self._process = subprocess.Popen(
            # -P: no file of the working directory may stand in for the harness's own imports
            [sys.executable, "-P", "-m", module, str(child_reads), str(child_writes), str(os.getpid())],
            pass_fds=(child_reads, child_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(settings or {}), MARK_VARIABLE: self.mark},
        )
        os.close(child_reads)
        os.close(child_writes)
        self._printed: deque[bytes] = deque(maxlen=_LAST_LINES)
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
        self.last_wall_ns = time.perf_counter_ns() - began
        self.asked_ns += self.last_wall_ns
        try:
            message = _without_half_characters(json.loads(line))
            answer: dict[str, Any] = message["answer"]
            if message["token"] != token or not isinstance(answer, dict):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()
            raise Died("it wrote into the harness's own pipe") from None
        if "failed" in answer:
            raise Failed(str(answer["failed"])[:600])
        return answer

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left))
            if not ready:
                self.close()
                raise Hung(f"it hung: no answer within {self.watchdog_s:g} s")
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
        last = self._last_words()
        return Died(f"it crashed: {name}{_HINTS.get(name, '')}{f' ({last})' if last else ''}")

    def _last_words(self) -> str:
        """The last line that the child printed, empty where it printed nothing."""
        lines = [text for line in self._printed if (text := line.decode(errors="replace").strip())]
        return lines[-1][:200] if lines else ""

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed while reading
            while part := self._process.stdout.readline(4096):
                self._printed.append(part)

    def close(self) -> None:
        """Kill the child and all that it started; remove its folder. May be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._write >= 0:
            end_marked(self.mark)
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


Channel = InProcess | Child


class Home:
    """A worker in a child, with a function or only a contract loaded; in a new child whenever the last has ended."""

    kind: type[Child] = Child

    def __init__(self, spec: str | None, contract: str, watchdog_s: float, settings: Mapping[str, str] | None = None) -> None:
        self._open: dict[str, Any] = {"spec": spec, "contract": contract}
        self._watchdog_s, self._settings = watchdog_s, settings
        self._child: Child | None = None
        self.opened: dict[str, Any] = {}  # what the child says of what it loaded

    def child(self) -> Child:
        """The child that is alive, or a new one. Raises Failed, Died."""
        if self._child is None or not self._child.alive:
            self._child = self.kind(WORKER, self._watchdog_s, self._settings)
            try:
                self.opened = self._child.ask("open", **self._open)
                self.loaded()
            except BaseException:
                self._child.close()
                raise
        return self._child

    def loaded(self) -> None:
        """Called when a new child has loaded it."""

    def at(self, problem: Problem) -> Child:
        """The child, at the beginning of a problem. Raises Failed, Died."""
        child = self.child()
        child.ask("problem", text=str(problem))
        return child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


def _without_half_characters(value: Any) -> Any:
    """The same JSON with ? for half characters, which escapes can spell and no file can hold."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
