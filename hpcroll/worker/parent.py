"""The rank's parent: starts the worker, outlives it, kills what it leaves and says that it is gone.

A worker that dies by SIGKILL cannot write anything any more. Its parent can: once the worker's process
tree is dead it writes `.ended`, which lets others take its rollouts over at once and not after a
silence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hpcroll.errors import HpcrollError
from hpcroll.fs import RunPaths
from hpcroll.spool import Spool, mark_ended
from hpcroll.worker.processes import adopt_orphans, kill_descendants

RESTART = 75
"""Exit status of a worker that asks its rank for a new incarnation (EX_TEMPFAIL of sysexits.h)."""
_BACK_OFF_S = (1.0, 4.0, 16.0)
"""Waits before a worker that was killed, or asked for it, is started again."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def run_rank(run_dir: Path, *, leg: str | None = None, rank: int = 0) -> int:
    """Runs one rank to its end and returns its exit status.

    0: nothing is left to do for this leg, or a drain was asked for and done. 1: the worker failed, or
    was killed more often than its rank starts it again. 2: bad usage. On return the worker's process
    tree is dead and each of its incarnations is marked as ended.
    """
    adopt_orphans()
    rank_process = _Rank(run_dir, leg, rank)
    for back_off_s in (*_BACK_OFF_S, None):
        status = rank_process.run_once()
        if rank_process.stopping and -status in _STOP_SIGNALS:
            return 0  # it came before the worker listened for it: nothing was claimed yet
        killed = status < 0
        if rank_process.stopping or back_off_s is None or not (killed or status == RESTART):
            return 1 if killed or status == RESTART else status
        time.sleep(back_off_s)
    raise AssertionError("the last round returns")


def packing_command(run_dir: Path, leg: str | None, rank: int) -> Sequence[str] | None:
    """What packs beside rank `rank` of `leg`; None where the config or another rank does not ask for it."""
    try:
        config = Spool.open(run_dir).config
    except HpcrollError:
        return None  # the worker meets the same error, and says it
    is_last = (leg or config.leg_names[0]) == config.leg_names[-1]
    if config.shards.pack == "off" or rank != 0 or not is_last:
        return None
    return [sys.executable, "-m", "hpcroll.worker.packing", str(run_dir)]


class _Rank:
    """One worker process at a time, with the signals of the rank forwarded to it."""

    def __init__(self, run_dir: Path, leg: str | None, rank: int) -> None:
        self._paths = RunPaths(run_dir)
        self._argv = [sys.executable, "-m", "hpcroll.worker.child", str(run_dir), "--rank", str(rank)]
        self._argv += ["--leg", leg] if leg else []
        self._packing = packing_command(run_dir, leg, rank)
        self._child: subprocess.Popen[bytes] | None = None
        self.stopping = False
        for number in _STOP_SIGNALS:
            signal.signal(number, self._forward)

    def run_once(self) -> int:
        """Starts a worker, waits for it, cleans up after it; its status, negative for a signal."""
        packing = subprocess.Popen(self._packing, stdin=subprocess.DEVNULL) if self._packing else None
        read_end, write_end = os.pipe()
        try:
            argv = [*self._argv, "--announce-fd", str(write_end)]
            self._child = subprocess.Popen(argv, pass_fds=[write_end])
        finally:
            os.close(write_end)
        if self.stopping:  # the signal came before there was a child to forward it to
            self._child.send_signal(signal.SIGTERM)
        status = self._child.wait()
        # Kill the tree first: while a payload still holds the pipe's write end, reading it to its end
        # would block.
        survivors = kill_descendants()
        if packing is not None:
            packing.poll()
        with os.fdopen(read_end, encoding="ascii") as announced:
            incarnations = announced.read().split()
        if survivors:
            # `.ended` promises a dead tree; without it the rollouts are taken over after a silence.
            print(f"rank: processes {survivors} cannot be killed; not marked as ended", file=sys.stderr)
            return status
        for incarnation in incarnations:
            mark_ended(self._paths, incarnation, status=status)
        return status

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)
