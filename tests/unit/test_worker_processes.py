"""Process trees: whatever a worker leaves is found and killed, however it hid."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

TREE = """
import os, subprocess, sys, time
from hpcroll.worker.processes import adopt_orphans, kill_descendants
adopt_orphans()
# A child that double-forks into sessions of its own, and a grandchild that ignores SIGTERM.
hide = "(setsid sh -c 'trap : TERM; echo $$ >> {pids}; sleep 1000' &);"
subprocess.run(["sh", "-c", hide + hide], check=True)
while not os.path.exists({pids!r}) or len(open({pids!r}).read().split()) < 2:
    time.sleep(0.01)
print("survivors", kill_descendants())
"""


def test_double_forked_sessions_are_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    done = subprocess.run(
        [sys.executable, "-c", TREE.format(pids=str(pids))], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "survivors []\n", done.stderr
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    child = (
        "import time\nfrom hpcroll.worker.processes import die_with_parent\n"
        "die_with_parent()\nprint('up', flush=True)\ntime.sleep(1000)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\ntime.sleep(1000)"
    )
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    handle = os.pidfd_open(pid)
    try:
        started.kill()
        started.wait()
        started.stdout.close()
        # The grandchild is not ours to wait for; its pidfd turns readable when it is gone.
        readable, _, _ = select.select([handle], [], [], 60)
        assert readable, f"process {pid} outlived its parent"
    finally:
        os.close(handle)
