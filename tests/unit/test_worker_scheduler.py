"""What is concluded from squeue's answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcroll.worker.scheduler import SlurmJobs


def squeue(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, answer: str, status: int = 0, error: str = ""
) -> Path:
    """Puts a squeue on PATH that notes its calls; the path of those notes."""
    calls = folder / "calls"
    script = folder / "squeue"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        f"printf '%s' '{answer}'\nprintf '%s' '{error}' >&2\nexit {status}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


def worker(job: str | None, restarts: int = 0) -> Any:
    return SimpleNamespace(job_id=job, restart_count=restarts)


def test_a_running_job_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, answer="12 RUNNING 0\n")
    assert SlurmJobs(0).ended(worker("12")) is False


def test_a_requeued_job_is_another_incarnation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, answer="12 RUNNING 1\n")
    assert SlurmJobs(0).ended(worker("12", restarts=0)) is True
    assert SlurmJobs(0).ended(worker("12", restarts=1)) is False


def test_a_job_that_waits_again_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, answer="12 PENDING 1\n")
    assert SlurmJobs(0).ended(worker("12")) is True


def test_a_forgotten_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(
        tmp_path, monkeypatch, answer="", status=1, error="slurm_load_jobs error: Invalid job id specified"
    )
    assert SlurmJobs(0).ended(worker("12")) is True


def test_a_silent_controller_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, answer="", status=1, error="Unable to contact slurm controller")
    assert SlurmJobs(0).ended(worker("12")) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert SlurmJobs(0).ended(worker("12")) is None


def test_a_worker_outside_slurm_is_never_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = squeue(tmp_path, monkeypatch, answer="")
    assert SlurmJobs(0).ended(worker(None)) is None
    assert not calls.exists()


def test_the_scheduler_is_asked_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = squeue(tmp_path, monkeypatch, answer="12 RUNNING 0\n")
    jobs = SlurmJobs(3600)
    for _ in range(10):
        assert jobs.ended(worker("12")) is False
    assert len(calls.read_text().splitlines()) == 1
