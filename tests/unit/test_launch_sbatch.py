"""From launch config to sbatch script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcroll.config import LaunchConfig, RunConfig, parse_config
from hpcroll.errors import ConfigError, LaunchError
from hpcroll.launch.command import CommandOutput
from hpcroll.launch.sbatch import check_launch, ranks_per_job, submitit_parameters
from hpcroll.launch.slurm import SlurmLauncher, _clean_environment


def no_slurm(argv: Sequence[str]) -> CommandOutput:
    raise LaunchError(f"{argv[0]} cannot be run")


def small_arrays(argv: Sequence[str]) -> CommandOutput:
    return CommandOutput(0, "MaxArraySize = 4\n" if argv[0] == "scontrol" else "cpu*\n", "")


def config(text: str) -> RunConfig:
    return parse_config(text, source="test")


def preview(text: str, run_dir: Path, *, workers: int = 3, leg: str = "init+run+eval") -> str:
    return SlurmLauncher(run_dir, config(text), run=no_slurm).preview(workers, leg=leg)


def test_script_says_what_the_config_says(tmp_path: Path) -> None:
    script = preview(
        """
        launch:
          partition: cpu
          time_min: 30
          cpus: 3
          memory_mb: 4000
          signal_s: 45
          array_parallelism: 2
          setup: [module load apptainer, export A=b]
          sbatch: {account: rl, exclusive: true, gres: "gpu:1", reservation: null, cpus-per-task: 5}
        """,
        tmp_path / "swe1",
    )
    lines = script.splitlines()
    for expected in (
        "#SBATCH --partition=cpu",
        "#SBATCH --time=30",
        "#SBATCH --cpus-per-task=5",
        "#SBATCH --mem=4000M",
        "#SBATCH --signal=USR2@45",
        "#SBATCH --array=0-2%2",
        "#SBATCH --account=rl",
        "#SBATCH --exclusive",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --job-name=hpcroll-swe1-init+run+eval",
        "module load apptainer",
        "export A=b",
    ):
        assert expected in lines, expected
    assert len([line for line in lines if "cpus-per-task" in line]) == 1
    assert "wckey" not in script
    assert "reservation" not in script
    assert lines.index("export A=b") < next(i for i, line in enumerate(lines) if line.startswith("srun "))


def test_each_leg_goes_to_its_own_partition(tmp_path: Path) -> None:
    text = "{legs: [[init, run], [eval]], launch: {partition: {init+run: gpu, eval: cpu}}}"
    assert "--partition=gpu" in preview(text, tmp_path, leg="init+run")
    assert "--partition=cpu" in preview(text, tmp_path, leg="eval")


def test_one_worker_is_no_array_and_many_are_split_at_max_array_size(tmp_path: Path) -> None:
    assert "--array" not in preview("{}", tmp_path, workers=1)
    launcher = SlurmLauncher(tmp_path, RunConfig(), run=small_arrays)
    assert launcher.preview(10, leg="init+run+eval").startswith(
        "# 10 workers for leg init+run+eval: 10 jobs in 3 "
    )
    batches = list(launcher._batches(10, "init+run+eval", 4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [rank.rank for batch in batches for rank in batch] == list(range(10))


def test_several_ranks_in_a_job_need_fewer_jobs() -> None:
    directives = {"nodes": 2, "ntasks-per-node": 4}
    assert ranks_per_job(LaunchConfig(sbatch=directives)) == 8
    assert ranks_per_job(LaunchConfig()) == 1
    with pytest.raises(ConfigError, match="ntasks must be a whole number"):
        ranks_per_job(LaunchConfig(sbatch={"ntasks": "many"}))


@pytest.mark.parametrize("name", ["output", "array", "signal", "--error", "time"])
def test_directives_that_break_the_launcher_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.sbatch.{name}"):
        submitit_parameters(LaunchConfig(sbatch={name: "x"}), leg="eval", job_name="j")


def test_warning_that_comes_with_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="told to drain as soon as they start"):
        check_launch(LaunchConfig(time_min=2, signal_s=120))
    check_launch(LaunchConfig(time_min=1, signal_s=45))


def test_submission_from_inside_a_job_hides_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0x1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    with _clean_environment():
        assert "SLURM_CPU_BIND" not in os.environ
        assert os.environ["SLURM_CONF"] == "/etc/slurm/other.conf"
        assert os.environ["SBATCH_ACCOUNT"] == "mine"
    assert os.environ["SLURM_CPU_BIND"] == "mask_cpu:0x1"
