"""`python -m hpcroll.launch.supervisor`: starts the local ranks of one launch and records their ends.

A process of its own, because the caller may be a trainer that exits before its ranks or that lives on
and never reaps them. It holds nothing that matters: should it be killed, the ranks go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from hpcroll.launch.identity import ProcessIdentity


def rank_file(directory: Path, rank: int) -> Path:
    """Holds the identity of the rank's process."""
    return directory / f"rank{rank}.json"


def exit_file(directory: Path, rank: int) -> Path:
    """Holds the rank's exit status once it has ended, negative for a signal."""
    return directory / f"rank{rank}.exit"


def supervisor_file(directory: Path) -> Path:
    """Holds the identity of the process that records the ranks' ends."""
    return directory / "supervisor.json"


def log_file(directory: Path, rank: int) -> Path:
    """The rank's output."""
    return directory / f"rank{rank}.log"


def start_rank(script: Path, directory: Path, rank: int) -> subprocess.Popen[bytes]:
    """Starts one rank in a session of its own and records who it is."""
    with log_file(directory, rank).open("ab") as log:
        process = subprocess.Popen(
            ["/bin/bash", str(script), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _write_identity(rank_file(directory, rank), process.pid)
    return process


def _write_identity(path: Path, pid: int) -> None:
    _write(path, json.dumps(ProcessIdentity.of(pid).to_dict()))


def _write(path: Path, text: str) -> None:
    # Written by this node for this node: atomic is enough, durable is not needed.
    temporary = path.with_suffix(path.suffix + f".{os.getpid()}")
    temporary.write_text(text + "\n")
    temporary.rename(path)


def supervise(directory: Path, script: Path, ranks: int, ready: int) -> None:
    """Starts the ranks, closes descriptor `ready` after a byte to it, and waits for all of them."""
    _write_identity(supervisor_file(directory), os.getpid())
    processes = {start_rank(script, directory, rank).pid: rank for rank in range(ranks)}
    os.write(ready, b"!")
    os.close(ready)
    while processes:
        pid, status = os.wait()
        rank = processes.pop(pid, None)
        if rank is not None:
            _write(exit_file(directory, rank), str(os.waitstatus_to_exitcode(status)))


def main() -> int:
    """Leaves a supervisor behind; 0 once its ranks are started, 1 where they could not be."""
    parser = argparse.ArgumentParser(prog="python -m hpcroll.launch.supervisor", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    read_end, write_end = os.pipe()
    # Forked away, so that it is no child of the caller, which might never reap it.
    if os.fork() == 0:
        os.close(read_end)
        os.setsid()
        supervise(arguments.directory, arguments.script, arguments.ranks, write_end)
        return 0
    os.close(write_end)
    return 0 if os.read(read_end, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
