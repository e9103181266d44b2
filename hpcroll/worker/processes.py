"""Process trees: adopting orphans, and killing everything that a worker left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Has the kernel SIGKILL this process when its parent dies (prctl(2)).

    Exits at once where the parent is gone already: the signal is only sent for a later death.
    """
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_descendants(deadline_s: float = 10.0) -> list[int]:
    """Kills and reaps every descendant of this process; the pids that still live at the deadline.

    Needs `adopt_orphans`. Loops, because a tree that forks while it is walked shows its new leaves
    only in the next round.
    """
    end = time.monotonic() + deadline_s
    while True:
        pids = _descendants(os.getpid())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if not pids or time.monotonic() > end:
            return pids
        time.sleep(0.02)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (parent := _parent_of(entry)) is not None:
            children[parent].append(int(entry.name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.pop(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _parent_of(entry: Path) -> int | None:
    """The parent of the process at /proc/<pid>; None where it is gone or only waits to be reaped."""
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses.
    state, parent, *_ = stat[stat.rindex(")") + 2 :].split()
    return None if state == "Z" else int(parent)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
