"""A pool is kept full step after step: its numbers add up, and a trainer that restarts does nothing twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.api.pool_tasks import PoolSettings
from hpcroll.api.replenish import Pool
from hpcroll.cli.main import run as run_command
from hpcroll.config import ShardConfig
from hpcroll.contract import StageTiming, Status, StopReason, Task, Timing, Verdict
from hpcroll.errors import ConfigError
from hpcroll.fs import list_names
from hpcroll.policy import WindowWatch
from hpcroll.shards import RunReader, ShardWriter, Step, StepCounts, StepVersions, open_run
from hpcroll.spool import Claim, Claims, Spool
from hpcroll.testing.trajectories import random_trajectory
from tests.spools import start_worker, unknown_job, wait_until

SAMPLES = 4
FLAT = {"t1", "t4"}
"""Tasks whose rollouts all get the same reward."""


def tasks(count: int = 8) -> list[Task]:
    spec = {"verify": ["true"]}
    return [Task(task_id=f"t{n}", handler="command", prompt=f"Number {n}.", spec=spec) for n in range(count)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", {"sandbox": {"name": "bwrap", "image": "host"}})


def replenish(run: Run, *, count: int = 8, **settings: Any) -> Pool:
    settings = {"samples": SAMPLES, "key": "pool", "groups_per_step": 3, "oversample": 1.5, **settings}
    return run.replenish(tasks(count), **settings)


class Fleet:
    """A worker that commits what it claims; rollouts for which `slow` holds wait until they are cancelled."""

    def __init__(self, run: Run, slow: Callable[[Claim], bool], flat: set[str]) -> None:
        self.committed = 0
        self._flat = flat
        self._spool = Spool.open(run.path)
        self._worker = start_worker(self._spool)
        watch = WindowWatch(self._spool.paths, run.config.model.name)
        self._worker.claims = Claims(
            self._spool, self._worker.incarnation, job_ended=unknown_job, limit=watch.limit
        )
        self._slow = slow
        self._waiting: list[Claim] = []
        self._writer = ShardWriter(self._spool.paths, self._worker.id, ShardConfig())
        self.stop = threading.Event()

    def work(self) -> None:
        with self._writer:
            while not self.stop.is_set():
                claim = self._worker.claims.next()
                if claim is not None and not claim.cancelled and self._slow(claim):
                    self._waiting.append(claim)
                elif claim is not None:
                    self._commit(claim, cancelled=claim.cancelled)
                for waiting in [c for c in self._waiting if self._spool.wishes.is_cancelled(c.rollout)]:
                    self._waiting.remove(waiting)
                    self._commit(waiting, cancelled=True)
                if claim is None:
                    self.stop.wait(0.005)

    def _commit(self, claim: Claim, *, cancelled: bool) -> None:
        rollout = claim.rollout
        flat = rollout.task.task_id in self._flat
        reward = None if cancelled else 1.0 if flat else float(rollout.sample_index % 2)
        ran = not claim.cancelled
        seconds = 50.0 if cancelled else 10.0
        fields: dict[str, Any] = {
            "task_id": rollout.task.task_id,
            "status": Status.CANCELLED if cancelled else Status.COMPLETED,
            "stop_reason": StopReason.CANCELLED if cancelled else StopReason.SUBMITTED,
            "verdict": None if cancelled else Verdict(reward=reward, evaluator="scripted"),
            "reward": reward,
            "reward_valid": not cancelled,
            "timing": Timing(run=StageTiming(started_at=0.0, duration_s=seconds) if ran else None),
        }
        if cancelled:
            fields |= {"trainable": False, "not_trainable_because": ("status cancelled",)}
        trajectory = random_trajectory(
            7,
            rollout_id=rollout.rollout_id,
            attempt=claim.attempt,
            incarnation=self._worker.id,
            turns=3,
            group_size=SAMPLES,
            **fields,
        )
        claim.note_record()
        address = self._writer.append(trajectory)
        self._writer.sync()
        if claim.commit():
            self._writer.mark([address])
        self.committed += 1


@contextmanager
def fleet(
    run: Run, slow: Callable[[Claim], bool] = lambda _: False, flat: set[str] = FLAT
) -> Iterator[Fleet]:
    member = Fleet(run, slow, flat)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(member.work)
        try:
            yield member
        finally:
            member.stop.set()
            future.result(60)


def follow(run: Run, **options: Any) -> RunReader:
    return open_run(run.path, columns=()).follow(trainer="grpo", poll_s=0.01, **options)


def steps(reader: RunReader, count: int) -> Iterator[Step]:
    found = reader.steps(groups=3, max_tokens=1_000_000, drop_zero_variance=True)
    yield from islice(found, count)


def groups_of(run: Run) -> int:
    return sum(segment.header.tasks for segment in Spool.open(run.path).segments())


def step_of(number: int, **counts: int) -> Step:
    """A step as a reader would give it, without rows."""
    return Step(number, (), (), 0, 0, StepCounts(**counts), StepVersions(None, None, None))


def test_numbers_add_up_and_dropped_groups_are_replaced(run: Run) -> None:
    pool = replenish(run)
    assert groups_of(run) == 5, "three and a half again"
    with fleet(run):
        for step in steps(follow(run), 6):
            before = groups_of(run)
            line = pool.after(step)
            fates = line.fates
            assert fates.delivered == 3 * step.number
            assert fates.settled == step.settled_groups
            assert fates.submitted == fates.delivered + fates.dropped + fates.open == before
            assert line.submitted == groups_of(run)
            # The pool may have seen a group of no use that the trainer has not met yet.
            dropped = max(fates.dropped, line.watched["dropped"])
            assert line.submitted - fates.delivered - dropped == 5, "as many are open as before"
    lines = pool.lines
    assert [line.step for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert lines[-1].fates.zero_variance > 0
    assert sum(line.added for line in lines) == lines[-1].submitted
    allowed = run.policy.allowance()
    assert allowed.settled >= lines[-1].fates.settled, "what the pool sees is of no use counts at once"
    assert allowed.settled - allowed.dropped == lines[-1].fates.delivered
    sampled = pool.samplings()
    assert sum(sampled.values()) == lines[-1].submitted
    assert max(sampled.values()) - min(sampled.values()) <= 1, "epoch after epoch"


def test_restarted_trainer_repeats_nothing(run: Run) -> None:
    pool, reader = replenish(run), follow(run)
    with fleet(run):
        states = []
        for step in steps(reader, 4):
            pool.after(step)
            states.append(reader.state_dict())
        ledger = [path.read_bytes() for path in sorted(run.path.glob("policy/replenish/*/*"))]
        keys = [segment.key for segment in Spool.open(run.path).segments()]
        again, restarted = replenish(Run.open(run.path)), follow(run)
        restarted.load_state_dict(states[1])
        for step in steps(restarted, 2):
            assert again.after(step) == pool.lines[step.number]
        assert [path.read_bytes() for path in sorted(run.path.glob("policy/replenish/*/*"))] == ledger
        assert [segment.key for segment in Spool.open(run.path).segments()] == keys
        for step in steps(restarted, 1):
            assert again.after(step).number == 5


def test_trainer_that_starts_from_nothing_takes_the_same_steps_and_submits_nothing_more(run: Run) -> None:
    pool = replenish(run)
    with fleet(run):
        for step in steps(follow(run), 3):
            pool.after(step)
        keys = [segment.key for segment in Spool.open(run.path).segments()]
        again = replenish(Run.open(run.path))
        for step in steps(follow(run), 3):
            again.after(step)
    assert [segment.key for segment in Spool.open(run.path).segments()] == keys


def test_line_whose_writer_died_before_it_submitted_is_carried_out_by_the_next_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_pool: Pool, _line: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "_do", die)
        with pytest.raises(KeyboardInterrupt):
            replenish(run)
    assert groups_of(run) == 0
    pool = replenish(run)
    assert groups_of(run) == 5
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "_do", die)
        with pytest.raises(KeyboardInterrupt):
            pool.after(step_of(1, delivered=3))
    assert groups_of(run) == 5
    again = replenish(run)
    assert groups_of(run) == 8
    assert again.after(step_of(1, delivered=3)).added == 3
    assert groups_of(run) == 8


def test_two_trainers_at_once_fill_one_pool(run: Run) -> None:
    start = threading.Barrier(4)

    def work(_number: int) -> None:
        mine = Run.open(run.path)
        start.wait()
        pool = replenish(mine)
        for number in range(1, 4):
            pool.after(step_of(number, delivered=3 * number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert groups_of(run) == 14
    assert [line.step for line in replenish(run).lines] == [0, 1, 2, 3]


def test_step_that_drops_all_that_was_open_is_filled_all_the_same(run: Run) -> None:
    """Five of eight tasks have no variance, and not one group more than a step needs is open."""
    with (
        replenish(run, oversample=1, groups_per_step=3) as pool,
        fleet(run, flat={"t0", "t1", "t2", "t3", "t4"}),
    ):
        for step in steps(follow(run), 4):
            line = pool.after(step)
            assert line.fates.submitted == line.fates.settled + line.fates.open
    lines = pool.lines
    assert [line.step for line in lines if not line.between] == [0, 1, 2, 3, 4]
    between = [line for line in lines if line.between]
    assert between
    assert all(line.parts or line.surplus for line in between), "nothing is written where nothing is done"
    assert lines[-1].fates.zero_variance > 0
    assert sum(line.added for line in lines) == groups_of(run)


def test_window_moves_on_for_what_replaces_useless_groups(run: Run) -> None:
    """No step is taken: only the pool can say that four of the first five groups are of no use."""
    run.policy.window(groups=5, versions=0, groups_per_version=5)
    pool = replenish(run, count=5)
    with fleet(run, flat={"t0", "t1", "t2", "t3"}) as member:
        wait_until(lambda: member.committed == 5 * SAMPLES, "all that may be started is committed")
        line = pool.tend()
        assert line is not None
        assert line.added == 4
        allowed = run.policy.allowance()
        assert (allowed.settled, allowed.dropped, allowed.limit) == (4, 4, 9)
        wait_until(lambda: member.committed == 9 * SAMPLES, "the others are committed")


def test_looking_after_a_full_pool_changes_nothing(run: Run) -> None:
    pool = replenish(run)
    assert pool.tend() is None
    with fleet(run) as member:
        wait_until(lambda: member.committed == 5 * SAMPLES, "all is committed")
    line = pool.tend()
    flat = 0 if line is None else line.added
    assert groups_of(run) == 5 + flat
    assert pool.tend() is None
    assert len(pool.lines) == (1 if line is None else 2)


def test_members_are_cancelled_as_soon_as_a_group_is_decided(run: Run) -> None:
    pool = replenish(run, min_usable=2, drop_zero_variance=False)
    with fleet(run, slow=lambda claim: claim.rollout.sample_index >= 2) as member:
        wait_until(lambda: member.committed == 5 * 2, "the fast half is committed")
        line = pool.tend()
        assert line is not None
        assert len(line.surplus) == 5
        assert line.added == 0
        wait_until(lambda: member.committed == 5 * SAMPLES, "the others are cancelled")
    later = pool.after(step_of(1, delivered=3))
    assert later.bias.cancelled.rollouts == 10
    assert sorted(later.withdrawn) == sorted(line.surplus)


def test_groups_that_grow_too_old_are_replaced(run: Run) -> None:
    pool = replenish(run, max_lag=5, drop_zero_variance=False)
    run.policy.publish(0, weights="w")
    with fleet(run) as member:
        wait_until(lambda: member.committed == 5 * SAMPLES, "all is committed")
    assert pool.tend() is None
    run.policy.publish(100, weights="w")
    line = pool.tend()
    assert line is not None
    assert line.added == 5
    assert pool.tend() is None


def test_surplus_members_are_cancelled_and_the_bias_is_recorded(run: Run) -> None:
    pool = replenish(run)
    with fleet(run, slow=lambda claim: claim.rollout.sample_index == 3):
        lines = [pool.after(step) for step in steps(follow(run, min_usable=2), 8)]
    assert any(line.surplus for line in lines)
    assert sum(line.bias.cancelled.rollouts for line in lines) > 0
    with_both = [line.bias for line in lines if line.bias.cancelled.rollouts and line.bias.kept.rollouts]
    assert with_both, "a line in which both kinds were committed"
    assert {bias.cancelled.run_s_median for bias in with_both} == {50.0}
    assert {bias.kept.run_s_mean for bias in with_both} == {10.0}
    assert all((bias.kept.tokens_median or 0) > 0 for bias in with_both)
    for line in lines:
        assert line.fates.submitted == line.fates.settled + line.fates.open


def test_wishes_of_groups_that_are_committed_are_taken_back(run: Run) -> None:
    pool = replenish(run)
    with fleet(run, slow=lambda claim: claim.rollout.sample_index == 3):
        for step in steps(follow(run, min_usable=2), 10):
            pool.after(step)
    surplus = {group for line in pool.lines for group in line.surplus}
    withdrawn = {group for line in pool.lines for group in line.withdrawn}
    assert withdrawn
    assert withdrawn <= surplus
    names = {name.replace(".g", "/g") for name in list_names(Spool.open(run.path).paths.cancel)}
    assert names == surplus - withdrawn


def test_last_step_leaves_nothing_open(run: Run) -> None:
    pool = replenish(run, steps=3)
    spool = Spool.open(run.path)
    with fleet(run):
        for step in steps(follow(run), 2):
            pool.after(step)
    # The workers are gone: what nobody runs is committed by the pool itself.
    with fleet(run) as members:
        (step,) = steps(follow_from(run, 2), 1)
        members.stop.set()
        line = pool.after(step)
    assert line.step == 3
    assert line.added == 0
    done = spool.exact_counts()
    assert done.done["init+run+eval"] == done.total
    again = replenish(Run.open(run.path), steps=3)
    assert again.after(step) == line


def follow_from(run: Run, number: int) -> RunReader:
    """A reader that has taken `number` steps."""
    reader = follow(run)
    for _ in steps(reader, number):
        pass
    return reader


def test_cancelled_groups_are_told_from_short_ones(run: Run) -> None:
    pool = replenish(run, count=20, steps_ahead=3)
    assert groups_of(run) == 14
    line = pool.after(step_of(1, delivered=3), last=True)
    assert len(line.cancelled) == 14, "none of these groups was ever committed"
    reader = open_run(run.path, columns=())
    counts = StepCounts(delivered=3, short=sum(1 for _ in reader) // SAMPLES)
    later = pool.after(step_of(2, **{"delivered": counts.delivered, "short": counts.short}), last=True)
    assert (later.fates.cancelled, later.fates.short) == (14, 0)
    assert later.bias.never_started == 14 * SAMPLES
    assert later.bias.cancelled.rollouts == 0


def test_pool_shrinks_to_what_the_steps_that_are_left_need(run: Run) -> None:
    pool = replenish(run, count=30, groups_per_step=4, oversample=1.0, steps_ahead=3, steps=4)
    assert groups_of(run) == 12
    assert pool.after(step_of(1, delivered=4)).added == 4
    line = pool.after(step_of(2, delivered=8))
    assert (line.added, line.fates.open, line.cancelled) == (0, 8, ())
    line = pool.after(step_of(3, delivered=12))
    assert (line.added, line.fates.open, line.cancelled) == (0, 4, ())
    line = pool.after(step_of(4, delivered=12, zero_variance=2))
    assert len(line.cancelled) == 16, "no group of this run was committed"


def test_every_epoch_has_an_order_of_its_own_and_the_seed_decides(tmp_path: Path) -> None:
    def order(name: str, seed: int) -> list[int]:
        run = Run.create(tmp_path / name, {"sandbox": {"name": "bwrap", "image": "host"}})
        pool = replenish(run, groups_per_step=4, oversample=1.0, seed=seed)
        for number in range(1, 6):
            pool.after(step_of(number, delivered=4 * number))
        return [index for line in pool.lines for part in line.parts for index in part]

    first = order("a", 1)
    assert first == order("b", 1)
    assert first != order("c", 2)
    epochs = [first[:8], first[8:16], first[16:24]]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batch_over_two_epochs_is_two_submissions(run: Run) -> None:
    pool = replenish(run, count=2, groups_per_step=5, oversample=1.0)
    assert [len(part) for part in pool.lines[0].parts] == [2, 2, 1]
    assert [segment.key for segment in Spool.open(run.path).segments()] == ["pool/0", "pool/0.1", "pool/0.2"]
    assert sorted(pool.samplings().values()) == [2, 3]


def test_list_that_was_gone_through_is_dry(run: Run) -> None:
    pool = replenish(run, groups_per_step=6, oversample=1.0, epochs=1)
    assert not pool.dry
    assert pool.after(step_of(1, delivered=6)).added == 2
    assert pool.dry
    assert pool.after(step_of(2, delivered=8)).added == 0


def test_tasks_without_variance_are_left_out_where_asked_for(run: Run) -> None:
    pool = replenish(run, exclude_after=1)
    with fleet(run):
        for step in steps(follow(run), 8):
            pool.after(step)
    excluded = [task for line in pool.lines for task in line.excluded]
    assert sorted(excluded) == sorted(FLAT)
    since = max(line.number for line in pool.lines if line.excluded)
    flat = {int(task[1:]) for task in FLAT}
    later = [index for line in pool.lines[since:] for part in line.parts for index in part]
    assert later
    assert not flat.intersection(later)


def test_key_stands_for_one_list_of_tasks(run: Run) -> None:
    replenish(run)
    with pytest.raises(ConfigError, match="begun with other tasks, samples or seed"):
        replenish(run, count=7)
    with pytest.raises(ConfigError, match="begun with other tasks, samples or seed"):
        replenish(run, seed=1)
    assert replenish(run, oversample=3).lines[0].number == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"groups_per_step": 0},
        {"oversample": 0.5},
        {"oversample": float("nan")},
        {"steps_ahead": 0},
        {"steps": 0},
        {"epochs": 0},
        {"exclude_after": 0},
        {"key": ""},
    ],
)
def test_impossible_settings_are_refused(run: Run, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="replenish: "):
        replenish(run, **wrong)
    assert groups_of(run) == 0


def test_pool_without_tasks_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="has no tasks"):
        run.replenish([], samples=2, key="pool", groups_per_step=2)


def test_target_is_whole_groups() -> None:
    settings = PoolSettings(samples=8, key="k", groups_per_step=16, oversample=1.25, steps=10)
    assert settings.target == 20
    assert [settings.target_after(step) for step in (0, 8, 9, 10, 11)] == [20, 20, 20, 0, 0]


def test_ledger_is_shown_as_a_table_that_adds_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["policy", "pool", str(run.path)]) == 0
    assert capsys.readouterr().out == "no pool was filled\n"
    pool = replenish(run)
    run.replenish(tasks(2), samples=1, key="other", groups_per_step=1)
    with fleet(run):
        for step in steps(follow(run), 2):
            pool.after(step)
    assert run_command(["policy", "pool", str(run.path), "pool", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        parts = ("delivered", "zero_variance", "short", "cancelled", "stale", "incomplete", "open")
        assert row["submitted"] == sum(row[part] for part in parts)
    assert rows[1]["kept"] > 0
    assert rows[1]["kept_run_s_median"] == 10.0
    assert run_command(["policy", "pool", str(run.path)]) == 0
    assert "zero variance" in capsys.readouterr().out
