"""Worker processes of a spool, started, killed, stopped and waited for by their pids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcroll.fs import RunPaths
from hpcroll.spool import Spool, mark_ended
from tests.spools import PATIENCE_S, wait_until

CHECKOUT = Path(__file__).parents[2]


class Member:
    """One worker process."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, run: Path) -> None:
        self.process = process
        self.run = run
        self._output = output

    @property
    def lines(self) -> list[str]:
        """What it has printed, whole lines only."""
        return self._output.read_text().split("\n")[:-1]

    @property
    def id(self) -> str:
        wait_until(lambda: bool(self.lines) or self.process.poll() is not None, "a worker registered")
        assert self.lines, f"worker {self.process.pid} ended with {self.process.returncode} before it began"
        return self.lines[0]

    def said(self, word: str) -> list[str]:
        return [line for line in self.lines[1:] if line.startswith(f"{word} ")]

    def kill(self, *, mark: bool) -> None:
        """SIGKILL; `mark`: then do what its parent does, and say that it has ended."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        if mark and self.lines:
            mark_ended(RunPaths(self.run), self.lines[0], status=self.process.returncode)

    def wait_stopped(self) -> None:
        """Waits until the kernel says that the process is stopped."""
        wait_until(lambda: self._state() == "T", f"worker {self.process.pid} is stopped")

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def wait_done(self) -> None:
        assert self.process.wait(PATIENCE_S) == 0, self.lines[-3:]

    def _state(self) -> str:
        assert self.process.poll() is None, f"worker {self.process.pid} died unnoticed"
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]


class Fleet:
    """The worker processes of one test; all of them are dead when the block ends."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.members: list[Member] = []

    def start(
        self,
        *,
        leg: str | None = None,
        work_s: float = 0.0,
        stop_at: str | None = None,
        run: Path | None = None,
        argv_prefix: tuple[str, ...] = (),
    ) -> Member:
        """Starts a worker on the run, by another path to it where `run` is given."""
        run = run or self.spool.paths.root
        argv = [*argv_prefix, sys.executable, "-m", "tests.faults.spool_worker", str(run)]
        argv += [leg or self.spool.config.leg_names[0], "--work-s", str(work_s)]
        argv += ["--stop-at", stop_at] if stop_at else []
        output = self.spool.paths.logs / f"member-{len(self.members)}"
        with output.open("wb") as stream:
            process = subprocess.Popen(argv, stdout=stream, cwd=CHECKOUT)
        self.members.append(Member(process, output, run))
        return self.members[-1]

    def wait_all_done(self) -> None:
        """Waits until every rollout has a result, and fails when a worker dies before that."""
        for member in self.members:
            if member.process.returncode is None:
                member.wait_done()

    def wait_results(self, at_least: int) -> None:
        leg = self.spool.config.leg_names[-1]
        wait_until(lambda: self.spool.exact_counts().done[leg] >= at_least, f"{at_least} rollouts are done")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self.members:
            member.process.kill()
            member.process.wait()
