"""Run: idempotent submission, results from any process, cancellation, retries, drains."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.config import RunConfig
from hpcroll.contract import Failure, FailureClass, Status, StopReason, Task
from hpcroll.errors import ConfigError
from hpcroll.shards import ShardWriter
from hpcroll.spool import Claims, Incarnation, Spool, sync_done_directories
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.pools import Flight

CONFIG = {
    "sandbox": {"name": "bwrap", "image": "host"},
    "launch": {"launcher": "local"},
    "lease": {"beat_s": 0.5, "silence_s": 5},
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", CONFIG)


def tasks(*names: str) -> list[Task]:
    return [Task(task_id=name, handler="math", prompt="1+1?", spec={"answer": "2"}) for name in names]


def commit(run: Run, statuses: dict[str, Status]) -> int:
    """Commits every rollout that is startable, with the status of its task; how many."""
    spool = Spool.open(run.path)
    incarnation = Incarnation.register(spool, leg="init+run+eval", rank=0)
    assembly = Assembly(spool, incarnation, harness="react", harness_version="1")
    claims = Claims(spool, incarnation, job_ended=lambda worker: None)
    count = 0
    with ShardWriter(spool.paths, incarnation.id, spool.config.shards) as writer:
        while (claim := claims.next()) is not None:
            status = statuses.get(claim.rollout.task.task_id, Status.COMPLETED)
            failed = status is Status.FAILED
            failure = Failure(attempt=1, reason="infra", failure_class=FailureClass.INFRA) if failed else None
            reason = StopReason.ERROR if failed else StopReason.SUBMITTED
            draft = assembly.draft(claim, status=status, stop_reason=reason, failure=failure)
            claim.note_record()
            address = writer.append(assembly.finish(draft, Flight(claim), None))
            writer.sync()
            assert claim.link_done()
            sync_done_directories([claim])
            writer.mark([address])
            count += 1
    return count


def test_run_is_created_once_and_opened_from_anywhere(tmp_path: Path, run: Run) -> None:
    again = Run.create(tmp_path / "run", CONFIG)
    opened = Run.open(tmp_path / "run")
    assert run.config == again.config == opened.config
    with pytest.raises(ConfigError, match="another config"):
        Run.create(tmp_path / "run", {**CONFIG, "harness": {"max_turns": 3}})
    with pytest.raises(ConfigError, match="holds no run"):
        Run.open(tmp_path / "other")


def test_config_may_be_yaml_mapping_or_model(tmp_path: Path) -> None:
    yaml = tmp_path / "a.yaml"
    yaml.write_text("sandbox: {name: bwrap, image: ./images/root}\nharness: {max_turns: 3}\n")
    (tmp_path / "images" / "root" / "bin").mkdir(parents=True)
    for name in ("sh", "cat"):
        (tmp_path / "images" / "root" / "bin" / name).touch(mode=0o755)
    run = Run.create(tmp_path / "r1", yaml, overrides=["harness.max_turns=5"])
    assert run.config.harness.max_turns == 5
    assert run.config.sandbox.image == str(tmp_path / "images" / "root")
    assert Run.create(tmp_path / "r2", RunConfig.model_validate(CONFIG)).config.sandbox.image == "host"
    with pytest.raises(ConfigError, match=r"config: stages\.redy: unknown key"):
        Run.create(tmp_path / "r3", {"stages": {"redy": 1}})


def test_submission_survives_its_process_and_is_one_however_often_it_is_sent(
    tmp_path: Path, run: Run
) -> None:
    first = run.submit(tasks("a", "b"), samples=2, key="k")
    code = (
        "import sys; from hpcroll import Run; from hpcroll.contract import Task;"
        "t = [Task(task_id=n, handler='math', prompt='1+1?', spec={'answer': '2'}) for n in 'ab'];"
        f"s = Run.open({str(run.path)!r}).submit(t, samples=2, key='k');"
        "print(s.created, s.segment.name)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", first.segment.name]


def test_results_come_once_each_as_they_are_committed_and_end_with_the_last(run: Run) -> None:
    run.submit(tasks("a"), samples=2, key="one")
    run.submit(tasks("b"), samples=2, key="two")
    assert list(run.results(wait=False)) == []
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(r.rollout_id for r in run.results("two")))
    reader.start()
    assert commit(run, {}) == 4
    reader.join(60)
    assert not reader.is_alive()
    assert sorted(seen) == [ref.rollout_id for ref in run.submission("two").refs()]
    assert len(list(run.results())) == 4
    (result, *_) = run.results("one")
    assert result.trajectory().record.rollout_id == result.rollout_id
    assert run.trajectory(result.rollout_id).record.task_id == "a"


def test_cancel_leaves_committed_results_and_later_submissions_alone(run: Run) -> None:
    run.submit(tasks("a"), samples=2, key="one")
    commit(run, {})
    run.submit(tasks("b"), samples=3, key="two")
    assert run.cancel() == 3
    assert run.cancel() == 0
    run.submit(tasks("c"), samples=1, key="three")
    assert commit(run, {}) == 1
    by_key = {key: {str(r.status) for r in run.results(key)} for key in ("one", "two", "three")}
    assert by_key == {"one": {"completed"}, "two": {"cancelled"}, "three": {"completed"}}


def test_cancel_of_one_rollout_is_that_rollout(run: Run) -> None:
    submission = run.submit(tasks("a"), samples=3, key="k")
    assert run.cancel(rollout=submission.refs[1].rollout_id) == 1
    commit(run, {})
    statuses = {r.rollout_id: r.status for r in run.results("k")}
    assert [statuses[ref.rollout_id] for ref in submission.refs] == ["completed", "cancelled", "completed"]


def test_retry_submits_whole_groups_of_what_failed_once_per_failure(run: Run) -> None:
    run.submit(tasks("a", "b", "c"), samples=2, key="k")
    commit(run, {"b": Status.FAILED, "c": Status.FAILED})
    (first,) = run.retry_failed()
    assert (first.key, [first.segment.task(i).task_id for i in range(2)]) == ("k+retry1", ["b", "c"])
    assert first.segment.samples == 2
    assert run.retry_failed() == []
    commit(run, {"c": Status.FAILED})
    (second,) = run.retry_failed("k")
    assert (second.key, second.segment.size, second.segment.task(0).task_id) == ("k+retry2", 2, "c")
    commit(run, {})
    assert run.retry_failed() == []


def test_hold_and_resume_decide_what_is_started(run: Run) -> None:
    run.submit(tasks("a"), samples=1, key="one")
    run.submit(tasks("b"), samples=1, key="two")
    run.hold("one")
    assert commit(run, {}) == 1
    run.resume("one")
    assert commit(run, {}) == 1


def test_status_counts_and_tells_rates_from_what_changed(run: Run) -> None:
    run.submit(tasks("a"), samples=4, key="k")
    before = run.status()
    run.cancel()
    after = run.status(exact=True)
    assert (before.committed, before.rate_per_min, before.done) == (0, None, False)
    assert (after.committed, after.done) == (4, True)
    assert after.rate_per_min is not None
    assert after.rate_per_min > 0
    assert after.left_s == 0
    assert after.exact is not None
    assert after.exact.done == {"init+run+eval": 4}


def test_policy_versions_are_published_through_the_run(run: Run) -> None:
    run.policy.publish(0, weights="ckpt/0")
    run.policy.publish(1, weights="ckpt/1")
    assert run.status().policy_version == 1
    lease = run.policy.register_endpoint("http://127.0.0.1:9", "policy")
    assert [endpoint.url for endpoint in run.endpoints] == ["http://127.0.0.1:9"]
    lease.withdraw()
    assert run.endpoints == ()


def test_partition_of_an_unknown_leg_is_refused(tmp_path: Path) -> None:
    launch = {"launcher": "slurm", "partition": {"evaluation": "cpu"}}
    with pytest.raises(ConfigError, match="evaluation, which is no leg"):
        Run.create(tmp_path / "run", {**CONFIG, "launch": launch})
