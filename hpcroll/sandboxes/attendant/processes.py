"""Who descends from whom, as `/proc` tells it."""

from __future__ import annotations

import os
import signal


def descendants(pid: int) -> list[int]:
    """The living descendants of `pid`, parents before their children; racy by nature."""
    children = _children_by_parent()
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def kill_descendants() -> None:
    """Sends SIGKILL to every descendant of this process that can be seen; call until none is left.

    For processes without a pid namespace of their own only. A child that is forked meanwhile is met by
    the next call: its parent is dead then, and this process its subreaper.
    """
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def kill_namespace() -> None:
    """Sends SIGKILL to all other processes of the pid namespace whose process 1 this is."""
    if os.getpid() != 1:
        # Anywhere else this would kill everything that the user runs on the node.
        raise RuntimeError("only process 1 of a sandbox's pid namespace may kill all others")
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, thousands of them
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    # The command's name, in parentheses, may itself hold blanks and parentheses.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    return children
