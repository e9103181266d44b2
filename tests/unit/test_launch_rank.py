"""The rank that submitit runs: signals, requeue, status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cloudpickle
import pytest

from hpcroll.launch.command import CommandOutput
from hpcroll.launch.rank import Rank, wants_requeue

RANK = Rank(run_dir="/runs/a", leg="init+run", rank=3, python="/opt/py", restarts=5)

PRELUDE = """
import sys
from pathlib import Path
from hpcroll.launch.rank import _Forwarder
child = "import signal, sys, pathlib\\n" \\
    "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\\n" \\
    "signal.signal(signal.SIGUSR2, lambda *a: sys.exit(0))\\n" \\
    "pathlib.Path(sys.argv[1]).touch()\\n" \\
    "signal.pause()\\n"
forwarder = _Forwarder()
status = forwarder.run([sys.executable, "-c", child, sys.argv[1]])
print(status, sorted(forwarder.stops))
"""


def scontrol(fields: str, *, exit_code: int = 0) -> tuple[list[list[str]], object]:
    asked: list[list[str]] = []

    def run(argv: Sequence[str]) -> CommandOutput:
        asked.append(list(argv))
        return CommandOutput(exit_code, fields, "slurm_load_jobs error: Invalid job id" if exit_code else "")

    return asked, run


@pytest.mark.parametrize(
    ("fields", "stops", "expected"),
    [
        ("JobId=7 JobState=RUNNING PreemptTime=None", {signal.SIGUSR2}, True),
        ("JobId=7 JobState=RUNNING PreemptTime=2026-11-29T23:00:00", {signal.SIGTERM}, True),
        ("JobId=7 JobState=RUNNING PreemptTime=None", {signal.SIGTERM}, False),
        ("JobId=7 JobState=CANCELLED PreemptTime=None", {signal.SIGTERM}, False),
        ("JobId=7 JobState=CANCELLED PreemptTime=None", {signal.SIGTERM, signal.SIGUSR2}, False),
        ("JobId=7 JobState=COMPLETING PreemptTime=None", {signal.SIGTERM}, False),
        ("JobId=7 JobState=TIMEOUT PreemptTime=None", {signal.SIGTERM}, True),
    ],
)
def test_only_time_limit_and_preemption_bring_a_rank_back(
    fields: str, stops: set[int], expected: bool
) -> None:
    asked, run = scontrol(fields)
    assert wants_requeue("7", stops, run=run) is expected  # type: ignore[arg-type]
    assert asked == [["scontrol", "show", "job", "--oneliner", "7"]]


def test_rank_survives_pickling_and_carries_no_live_object() -> None:
    again = cloudpickle.loads(cloudpickle.dumps(RANK))
    assert again == RANK
    assert again.checkpoint().function == RANK


def test_ranks_of_one_job_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "1")
    expected = ["/opt/py", "-m", "hpcroll.worker", "/runs/a", "--leg", "init+run", "--rank", "13"]
    assert RANK._argv() == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_to_the_submitit_process_alone_drains_the_rank(number: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE, str(ready)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        _wait_for(ready)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert output.split() == ["0", f"[{number.value}]"]


def test_signal_to_the_whole_step_ends_rank_once_and_quietly(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE, str(ready)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        _wait_for(ready)
        os.killpg(process.pid, signal.SIGUSR2)
        output, errors = process.communicate(timeout=60)
    status, stops = output.split()
    # The forwarded second signal may meet an interpreter that is already on its way out.
    assert int(status) in (0, -signal.SIGUSR2)
    assert stops == f"[{signal.SIGUSR2.value}]"
    assert "Traceback" not in errors


def _wait_for(path: Path, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear within {timeout_s} s"
        time.sleep(0.01)
