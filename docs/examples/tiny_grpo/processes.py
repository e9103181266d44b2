"""The loop's processes: started, looked after, killed on purpose, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcroll import Run
from hpcroll.spool import Spool
from tiny_grpo.layout import Layout

_PACKAGES = Path(__file__).parents[1]
_READY_S = 300.0


class LoopError(Exception):
    """A part of the loop ended or did not start; the text says which, and what it said last."""


class Program:
    """One of our own modules as a process, its output in a log."""

    def __init__(self, layout: Layout, name: str, *arguments: str) -> None:
        self._argv = [sys.executable, "-m", f"tiny_grpo.{name}", *arguments]
        self._log = layout.log(name)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        paths = os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths},
            )

    def kill(self) -> None:
        """SIGKILL: nothing of the process gets to run any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ended(self) -> bool:
        """Whether it ended well; raises `LoopError` with the end of its log where it failed."""
        assert self._process is not None
        status = self._process.poll()
        if status:
            text = self._log.read_text(errors="replace")[-2000:]
            raise LoopError(f"{' '.join(self._argv[1:])} ended with status {status}:\n{text}")
        return status == 0


def wait_until(ready: Callable[[], bool], what: str) -> None:
    """Returns once `ready()`; raises `LoopError` after five minutes."""
    end = time.monotonic() + _READY_S
    while not ready():
        if time.monotonic() > end:
            raise LoopError(f"{what} did not happen within {_READY_S:g} s")
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether the server at `url` is up."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def kill_workers(run: Run) -> None:
    """SIGKILLs every worker of `run`, all of them on this node. Their parents start them again."""
    for worker in Spool.open(run.path).counts().workers:
        if not worker.ended and worker.info.role == "worker":
            with suppress(ProcessLookupError):
                os.kill(worker.info.pid, signal.SIGKILL)
