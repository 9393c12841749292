"""Requests to a worker: function calls in this process, or messages over pipes to a child that may crash, hang, exit or lie.

A message is one line of JSON. There is a pipe in each direction, apart from standard output, to which the child's code may
print. A child has its own process session and is killed with all processes that it started. It runs ``child.serve``.
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

from pydantic import ValidationError

from flashmoe_science.measure.child import Command, failure
from flashmoe_science.measure.sandbox.processes import MARK_VARIABLE, end_marked
from flashmoe_science.measure.sandbox.settings import Settings
from flashmoe_science.measure.start import MODULE as START
from flashmoe_science.measure.worker.worker import MODULE as WORKER
from flashmoe_science.measure.worker.worker import Opened
from flashmoe_science.problem import Problem

_MAX_REPLY = 64 * 2**20  # bytes: samples and facts are far less
_LAST_LINES = 20  # that the child printed, kept for the reason of its end
_MAX_WORDS = 600  # of a failure
_GRACE_S = 5.0
_ILLEGAL = ", an illegal memory access"
_HINTS = {"SIGSEGV": _ILLEGAL, "SIGBUS": _ILLEGAL, "SIGKILL": ", killed from outside or for want of memory"}
_NONSENSE = "it wrote into the harness's own pipe"


class Failed(RuntimeError):
    """A request failed; the message is the reason. The worker still runs."""

    @property
    def cannot_serve(self) -> str | None:
        """The reason where the kernel raised CannotServe for these tensors; None for any other failure."""
        kind, _, reason = str(self).partition(": ")
        return reason if kind == "CannotServe" else None


class TooLittleMemory(Exception):
    """The GPU has too little memory for the harness's own tensors, such as references: no fault of a kernel. The message is the
    reason, which holds for one problem."""


class Died(RuntimeError):
    """The child crashed, ended itself or sent an invalid message. The message is the reason, ``code`` its name in records."""

    code = "crashes"


class Hung(Died):
    """The child did not answer within the watchdog's time."""

    code = "hangs"


class Tampered(Died):
    """The child replaced a function that the clocks or the checks depend on."""

    code = "tampers"


class Unusable(Exception):
    """A function cannot be measured at all; the message is the reason."""


class Endpoint(Protocol):
    """A worker or an oracle that answers requests, in this process or another."""

    def ask(self, do: str, **what: Any) -> dict[str, Any]: ...


class InProcess:
    """Sends requests to an object of this process; what the object raises becomes Failed or TooLittleMemory."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.folder = Path(f"in-process-{id(self)}")  # the names under which tensors are handed over; nothing is written there
        self.last_wall_ns = 0
        self._settings = Settings()

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        if do == "problem":
            self._settings = Settings()
        began = time.perf_counter_ns()
        try:
            answer = self._command(do)(**what)
        except Exception as error:
            raise _failed(failure(error)) from error
        self.last_wall_ns = time.perf_counter_ns() - began
        return answer

    def drain(self) -> tuple[list[str], list[str]]:
        """As ``Child.drain``; settings are set back to what they were when the problem began."""
        return self._settings.left(), []


class Child:
    """A child process that runs a module's ``main``, with a private folder for tensors. Settings that the child left changed
    and other side effects are collected until ``drain``."""

    def __init__(self, module: str, watchdog_s: float, settings: Mapping[str, str] | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._folder = tempfile.TemporaryDirectory(prefix="flashmoe-")
        self.folder = Path(self._folder.name)
        self.last_wall_ns = 0  # from sending the last request to having its answer, on this process's clock
        self.request_ns = 0  # from requests to their answers, in all
        self.mark = secrets.token_hex(8)
        self._settings: list[str] = []
        self._remarks: list[str] = []
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        self._pending = b""
        self._process = subprocess.Popen(
            # -P: no file of the working directory may shadow the harness's own imports
            [sys.executable, "-P", "-m", START, module, str(child_reads), str(child_writes), str(os.getpid())],
            pass_fds=(child_reads, child_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(settings or {}), MARK_VARIABLE: self.mark},
        )
        self.pid = self._process.pid
        os.close(child_reads)
        os.close(child_writes)
        self._printed: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises Failed, TooLittleMemory: the request failed and the child still runs.
        Raises Died."""
        token = secrets.token_hex(8)
        request = json.dumps({"token": token, "do": do, "what": what}).encode() + b"\n"
        began = time.perf_counter_ns()
        try:
            os.write(self._write, request)
        except BrokenPipeError:
            raise self._died() from None
        line = self._line(time.monotonic() + self.watchdog_s)
        self.last_wall_ns = time.perf_counter_ns() - began
        self.request_ns += self.last_wall_ns
        try:
            message = _without_surrogates(json.loads(line))
            answer: dict[str, Any] = message["answer"]
            if message["token"] != token or not isinstance(answer, dict):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._closed(Died(_NONSENSE)) from None
        if "failed" in answer:
            raise _failed(answer)
        if answer.get("replaced"):
            names = ", ".join(map(str, answer["replaced"][:4]))
            raise Tampered(f"it replaced {names}, which the clocks and checks rest on")
        self._settings += map(str, answer.get("settings", ()))
        self._remarks += map(str, answer.get("remarks", ()))
        return answer

    def drain(self) -> tuple[list[str], list[str]]:
        """Settings left changed and remarks on other side effects since the last call, each once."""
        drained = list(dict.fromkeys(self._settings)), list(dict.fromkeys(self._remarks))
        self._settings, self._remarks = [], []
        return drained

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._closed(Hung(f"it hung: no answer within {self.watchdog_s:g} s, the watchdog's limit"))
            part = os.read(self._read, 2**16)
            if not part:
                raise self._died()
            self._pending += part
            if len(self._pending) > _MAX_REPLY:
                raise self._closed(Died(_NONSENSE))
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _closed(self, error: Died) -> Died:
        self.close()
        return error

    def _died(self) -> Died:
        """The error that explains the child's end: its exit status and its last printed line."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return self._closed(Died("it closed the harness's pipes"))
        self.close()
        if code >= 0:
            return Died(f"it ended the process with code {code} (os._exit or the like)")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        lines = [text for line in self._printed if (text := line.decode(errors="replace").strip())]
        return Died(f"it crashed: {name}{_HINTS.get(name, '')}{f' ({lines[-1][:200]})' if lines else ''}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed while reading
            while part := self._process.stdout.readline(4096):
                self._printed.append(part)

    def close(self) -> None:
        """Kill the child and all that it started; remove its folder. May be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
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
    def alive(self) -> bool:
        return self._process.poll() is None and self._write >= 0


Channel = InProcess | Child


class WorkerHost:
    """A worker in a child process with a function, or only a contract, loaded; restarted in a new child after one has ended."""

    def __init__(self, spec: str | None, contract: str, watchdog_s: float, settings: Mapping[str, str] | None = None) -> None:
        self._open = {"spec": spec, "contract": contract}
        self._watchdog_s, self._settings = watchdog_s, settings
        self._child: Child | None = None
        self.imported: list[str] = []  # settings that loading it changed, which are set back

    def open(self) -> Opened:
        """Load the function and return what the child reports about it and its contract. Raises Unusable, Tampered."""
        try:
            self.child()
        except Tampered:
            raise
        except (Failed, Died) as error:
            raise Unusable(f"it could not be loaded: {error}") from error
        return self.opened

    def child(self) -> Child:
        """The child that is alive, or a new one. Raises Failed, Died."""
        if self._child is None or not self._child.alive:
            self._child = Child(WORKER, self._watchdog_s, self._settings)
            try:
                self.opened = Opened.model_validate(self._child.ask("open", **self._open))
                self.imported, _ = self._child.drain()
            except ValidationError as error:  # values that no record can hold, or that cannot be named on a command line
                self.close()
                first = error.errors()[0]
                raise Failed(f"its contract gives {first['loc'][0]} that are invalid: {first['msg']}") from None
            except BaseException:
                self.close()
                raise
        return self._child

    def at(self, problem: Problem) -> Child:
        """The child, at the beginning of a problem. Raises Failed, Died."""
        child = self.child()
        child.ask("problem", text=str(problem))
        return child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


def _failed(answer: Mapping[str, Any]) -> Failed | TooLittleMemory:
    """The error of a failed request, by ``child.failure``."""
    kind = TooLittleMemory if answer.get("memory") else Failed
    return kind(str(answer["failed"])[:_MAX_WORDS])


def _without_surrogates(value: Any) -> Any:
    """The same JSON with ? for lone surrogates, which escapes can spell and no file can hold."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
