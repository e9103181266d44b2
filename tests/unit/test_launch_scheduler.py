"""What is asked of Slurm, how often, and how its answers are read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from hpcroll.errors import LaunchError
from hpcroll.launch.base import JobState
from hpcroll.launch.command import CommandOutput, run_command
from hpcroll.launch.scheduler import SlurmView, job_state, query_states, slurm_facts
from tests.clock import Clock


class FakeSlurm:
    """Answers by program name; `answers` may be changed between queries."""

    def __init__(self, **answers: str | CommandOutput) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> CommandOutput:
        self.asked.append(list(argv))
        answer = self.answers.get(argv[0], "")
        return answer if isinstance(answer, CommandOutput) else CommandOutput(0, answer, "")


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", JobState.PENDING),
        ("REQUEUED", JobState.PENDING),
        ("RUNNING", JobState.RUNNING),
        ("SUSPENDED", JobState.RUNNING),
        ("COMPLETED", JobState.DONE),
        ("CANCELLED by 1001", JobState.DONE),
        ("CANCELLED+", JobState.DONE),
        ("TIMEOUT", JobState.FAILED),
        ("NODE_FAIL", JobState.FAILED),
        ("", JobState.UNKNOWN),
    ],
)
def test_slurm_states_become_ours(word: str, state: JobState) -> None:
    assert job_state(word) is state


def test_one_query_answers_for_all_jobs_and_accounting_for_the_rest() -> None:
    slurm = FakeSlurm(squeue="12_0|RUNNING\n12_1|PENDING\n", sacct="12_[2-3,5%2]|CANCELLED by 1\n9|FAILED\n")
    states = query_states(["12_0", "12_1", "12_2", "12_3", "12_5", "9"], slurm)
    assert states == {
        "12_0": JobState.RUNNING,
        "12_1": JobState.PENDING,
        "12_2": JobState.DONE,
        "12_3": JobState.DONE,
        "12_5": JobState.DONE,
        "9": JobState.FAILED,
    }
    assert [argv[0] for argv in slurm.asked] == ["squeue", "sacct"]
    assert "--jobs=12,9" in slurm.asked[0]


def test_array_tasks_that_never_started_are_known_by_the_arrays_bare_number() -> None:
    slurm = FakeSlurm(squeue="", sacct="70_0|COMPLETED\n70|CANCELLED by 1001\n")
    done = dict.fromkeys(("70_0", "70_1", "70_2"), JobState.DONE)
    assert query_states(["70_0", "70_1", "70_2"], slurm) == done


def test_scheduler_is_asked_once_a_poll_interval_whatever_the_number_of_jobs() -> None:
    slurm, clock = FakeSlurm(squeue="1|RUNNING\n2|RUNNING\n"), Clock()
    view = SlurmView(poll_s=60, run=slurm, clock=clock)
    for _ in range(50):
        assert view.states(["1", "2"]) == {"1": JobState.RUNNING, "2": JobState.RUNNING}
        clock.now_s += 1
    assert len(slurm.asked) == 1
    clock.now_s += 11
    view.states(["1", "2"])
    assert len(slurm.asked) == 2


def test_failing_scheduler_is_asked_ever_less_often_and_last_states_stand() -> None:
    slurm, clock = FakeSlurm(squeue="1|RUNNING\n"), Clock()
    view = SlurmView(poll_s=60, run=slurm, clock=clock)
    view.states(["1"])
    slurm.answers["squeue"] = CommandOutput(1, "", "Unable to contact slurm controller")
    moments = []
    for _ in range(3600):
        clock.now_s += 1
        before = len(slurm.asked)
        assert view.states(["1"]) == {"1": JobState.RUNNING}
        if len(slurm.asked) > before:
            moments.append(clock.now_s)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert gaps == [120, 240, 480, 900, 900, 900]
    assert view.trouble is not None
    assert "Unable to contact" in view.trouble


def test_job_that_nobody_knows_any_more_ends_as_failed_not_as_unknown_forever() -> None:
    slurm, clock = FakeSlurm(squeue="", sacct=CommandOutput(1, "", "accounting storage is disabled")), Clock()
    view = SlurmView(poll_s=60, run=slurm, clock=clock)
    assert view.states(["5"]) == {"5": JobState.UNKNOWN}
    clock.now_s += 61
    assert view.states(["5"]) == {"5": JobState.FAILED}


def test_ended_jobs_are_not_asked_for_again() -> None:
    slurm, clock = FakeSlurm(squeue="1|COMPLETED\n"), Clock()
    view = SlurmView(poll_s=60, run=slurm, clock=clock)
    view.states(["1"])
    clock.now_s += 1000
    assert view.states(["1"]) == {"1": JobState.DONE}
    assert len(slurm.asked) == 1


def test_facts_name_what_launching_depends_on() -> None:
    config = (
        "AccountingStorageType   = accounting_storage/slurmdbd\nJobRequeue              = 1\n"
        "KillWait                = 5 sec\nMaxArraySize            = 1001\n"
        "PreemptExemptTime       = \nPreemptMode             = REQUEUE\nSLURM_VERSION           = 22.05.8\n"
    )
    facts = slurm_facts(FakeSlurm(scontrol=config, sinfo="gpu\ncpu*\ngpu\n"))
    assert (facts.version, facts.max_array_size, facts.kill_wait_s) == ("22.05.8", 1001, 5)
    assert (facts.preempt_mode, facts.partitions) == ("REQUEUE", ("cpu", "gpu"))
    assert facts.accounting
    assert facts.requeue


def test_absent_and_hanging_programs_are_one_clear_error() -> None:
    with pytest.raises(LaunchError, match="no-such-program-here cannot be run"):
        run_command(["no-such-program-here"])
    with pytest.raises(LaunchError, match="did not answer within"):
        run_command(["sleep", "60"], timeout_s=0.2)
