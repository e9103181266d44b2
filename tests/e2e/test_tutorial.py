"""The tutorial, word for word: its shell blocks, in order, as a reader would paste them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.shards import verify_run
from tests.capabilities import IMAGES, need

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""Blocks headed `sh install` make what the test environment already is, and are not run."""


def part(number: int) -> str:
    """The shell blocks of one part, as one script."""
    text = TUTORIAL.read_text().split("\n## ")
    (section,) = [piece for piece in text if piece.startswith(f"Part {number}:")]
    return "set -euo pipefail\n" + "\n".join(BLOCK.findall(section))


def paste(script: str, folder: Path, **environ: str) -> None:
    """Runs `script` in `folder` with this interpreter's commands first on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (folder / "output").open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={**os.environ, **environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = shell.wait(540)
        finally:
            # What a block that failed left in the background: servers withdraw and stop on SIGTERM.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    assert status == 0, (folder / "output").read_text()


@pytest.mark.timeout(600)
def test_part_one_works_as_written(tmp_path: Path) -> None:
    need("bwrap")
    paste(part(1), tmp_path)
    run = Run.open(tmp_path / "playground" / "runs" / "first")
    results = list(run.results(wait=False))
    rewards = [result.reward for result in results]
    assert len(results) == 16
    assert set(rewards) == {0.0, 1.0}
    assert verify_run(run.path).ok
    assert run.status().endpoints == ()
    output = (tmp_path / "output").read_text()
    assert "were submitted before" in output
    assert "to train on" in output


@pytest.mark.slurm
@pytest.mark.apptainer
@pytest.mark.timeout(600)
def test_part_two_works_on_slurm_as_written(tmp_path: Path) -> None:
    paste(part(2), tmp_path, IMAGE=str(IMAGES / "base"))
    run = Run.open(tmp_path / "playground" / "runs" / "cluster")
    results = list(run.results(wait=False))
    assert [result.reward for result in results] == [1.0] * 8
    assert verify_run(run.path).ok
    status = run.status()
    assert status.closed
    assert status.failures == ()
