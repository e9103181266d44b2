"""The demo, and a trainer on what it left: the two ends of the main job, as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hpcroll.api import Run
from tests.capabilities import need

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "trainer_loop.py"
LAST_LINE = re.compile(r"demo: (\d+) rollouts committed, (\d+) action tokens, mean reward (\d\.\d+)")


def run(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_ends_with_rollouts_that_a_trainer_reads(tmp_path: Path) -> None:
    need("bwrap")
    root = tmp_path / "demo"
    last = LAST_LINE.fullmatch(run("-m", "hpcroll.cli", "demo", str(root)).splitlines()[-1])
    assert last is not None
    rollouts, tokens, mean = int(last[1]), int(last[2]), float(last[3])
    assert rollouts >= 24
    assert tokens > rollouts
    assert 0.0 < mean < 1.0
    Run.open(root).close()  # or the trainer would wait for more
    steps = run(str(EXAMPLE), str(root), "--max-tokens", "4096").splitlines()
    assert len(steps) > 2
    trained = sum(int(re.search(r"(\d+) trained tokens", line)[1]) for line in steps)  # type: ignore[index]
    assert trained == tokens
    assert run(str(EXAMPLE), str(root)) == ""  # a restart goes on where it stopped: nothing is left
