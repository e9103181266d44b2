"""The window: what its bounds allow, and that only the trainer's progress ever widens it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from hpcroll.contract.policy import LineageBase, PolicyVersion
from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths, make_directories
from hpcroll.policy import Bounds, PolicyRegistry, WindowState, WindowWatch
from hpcroll.policy.window import LOOK_S, allowance
from tests.clock import Clock


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    make_directories(list(paths.directories()))
    return paths


def version(number: int, base: LineageBase | None = None) -> PolicyVersion:
    return PolicyVersion(policy_name="policy", lineage="main", version=number, base=base or LineageBase())


def limit(
    *,
    settled: int = 0,
    dropped: int = 0,
    latest: PolicyVersion | None = None,
    **bounds: int,
) -> int | None:
    state = WindowState(bounds=Bounds(**bounds) if bounds else None, settled=settled, dropped=dropped)
    return allowance(state, latest).limit


def test_no_window_allows_everything() -> None:
    assert limit(settled=3) is None


@pytest.mark.parametrize(("settled", "allowed"), [(0, 8), (5, 13), (16, 24)])
def test_groups_may_be_ahead_of_what_is_settled(settled: int, allowed: int) -> None:
    assert limit(groups=8, settled=settled) == allowed


@pytest.mark.parametrize(("latest", "allowed"), [(None, 12), (0, 12), (1, 16), (5, 32)])
def test_versions_may_be_ahead_of_what_is_published(latest: int | None, allowed: int) -> None:
    newest = None if latest is None else version(latest)
    assert limit(versions=2, groups_per_version=4, latest=newest) == allowed


def test_tighter_of_two_bounds_counts() -> None:
    bounds = {"groups": 10, "versions": 1, "groups_per_version": 4}
    assert limit(**bounds, latest=version(0)) == 8
    assert limit(**bounds, latest=version(3)) == 10
    assert limit(**bounds, latest=version(3), settled=4) == 14
    assert limit(**bounds, latest=version(3), settled=40) == 20


def test_dropped_groups_take_no_place_in_a_version() -> None:
    assert limit(versions=0, groups_per_version=4, latest=version(1), settled=7, dropped=3) == 11


def test_versions_count_from_where_the_lineage_begins() -> None:
    base = LineageBase(version=12, settled=100, dropped=20)
    bounds = {"versions": 1, "groups_per_version": 8}
    assert limit(**bounds, latest=version(12, base), settled=100, dropped=20) == 116
    assert limit(**bounds, latest=version(14, base), settled=120, dropped=24) == 136


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({}, "needs groups, or versions"),
        ({"versions": 1}, "both versions and groups_per_version"),
        ({"groups_per_version": 1, "groups": 4}, "both versions and groups_per_version"),
        ({"groups": 0}, "cannot be set"),
        ({"versions": -1, "groups_per_version": 8}, "cannot be set"),
    ],
)
def test_windows_that_bound_nothing_are_refused(
    paths: RunPaths, bounds: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PolicyRegistry(paths).window(**bounds)
    assert PolicyRegistry(paths).allowance().limit is None


@pytest.mark.parametrize("numbers", [(-1, None), (4, 5), (4, -1)])
def test_impossible_progress_is_refused(paths: RunPaths, numbers: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigError, match="count groups since the run began"):
        PolicyRegistry(paths).settle(numbers[0], dropped=numbers[1])


def test_settled_groups_never_go_down(paths: RunPaths) -> None:
    trainer = PolicyRegistry(paths)
    trainer.window(groups=4)
    assert trainer.settle(10, dropped=2).limit == 14
    again = PolicyRegistry(paths)
    assert again.settle(6, dropped=1).limit == 14
    assert (again.allowance().settled, again.allowance().dropped) == (10, 2)
    assert again.settle(11).dropped == 2


def test_same_window_and_progress_again_write_nothing(paths: RunPaths) -> None:
    trainer = PolicyRegistry(paths)
    trainer.window(groups=4)
    trainer.settle(3)
    before = sorted(path.name for path in paths.window_now.parent.iterdir())
    restarted = PolicyRegistry(paths)
    restarted.window(groups=4)
    for n in (1, 2, 3):
        restarted.settle(n)
    assert sorted(path.name for path in paths.window_now.parent.iterdir()) == before == ["1", "2", "now"]


def test_lifted_window_keeps_what_is_settled(paths: RunPaths) -> None:
    trainer = PolicyRegistry(paths)
    trainer.settle(5)
    trainer.window(groups=4)
    assert trainer.lift_window()
    assert trainer.allowance().limit is None
    assert not trainer.lift_window()
    trainer.window(groups=1)
    assert trainer.allowance().limit == 6


def test_trainer_that_died_before_the_name_moved_is_completed_by_the_next_call(paths: RunPaths) -> None:
    trainer = PolicyRegistry(paths)
    trainer.window(groups=4)
    old = paths.window_now.read_bytes()
    trainer.settle(8)
    paths.window_now.write_bytes(old)
    watch = WindowWatch(paths, "policy")
    assert watch.limit() == 4, "late, and therefore less"
    assert PolicyRegistry(paths).settle(8).limit == 12
    assert WindowWatch(paths, "policy").limit() == 12


def test_parties_that_settle_at_once_leave_the_highest_number(paths: RunPaths) -> None:
    PolicyRegistry(paths).window(groups=1)
    start = threading.Barrier(6)

    def work(number: int) -> None:
        registry = PolicyRegistry(paths)
        start.wait()
        for step in range(5):
            registry.settle(6 * step + number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert WindowWatch(paths, "policy").limit() == 30


def test_exhausted_window_is_said_aloud(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    trainer = PolicyRegistry(paths)
    trainer.publish(0, weights="w")
    trainer.window(versions=0, groups_per_version=4)
    with caplog.at_level(logging.WARNING):
        trainer.settle(3)
        assert not caplog.records
        trainer.settle(4)
    assert "window=exhausted settled=4 limit=4" in caplog.text
    assert trainer.publish(1, weights="w").version == 1
    assert trainer.allowance().limit == 8


def test_watch_looks_again_after_a_second_and_not_before(paths: RunPaths) -> None:
    clock = Clock()
    trainer, watch = PolicyRegistry(paths), WindowWatch(paths, "policy", clock=clock)
    assert watch.limit() is None
    trainer.window(groups=4)
    assert watch.limit() is None
    clock.now_s += LOOK_S
    assert watch.limit() == 4
    trainer.settle(4)
    assert watch.limit() == 4
    clock.now_s += LOOK_S
    assert watch.limit() == 8


def test_watch_tells_whether_more_will_be_submitted(paths: RunPaths) -> None:
    clock = Clock()
    trainer, watch = PolicyRegistry(paths), WindowWatch(paths, "policy", clock=clock)
    assert not watch.expects_more()
    trainer.expect(more=True)
    trainer.settle(3)
    clock.now_s += LOOK_S
    assert watch.expects_more()
    assert watch.limit() is None
    trainer.expect(more=False)
    clock.now_s += LOOK_S
    assert not watch.expects_more()


def test_watch_follows_publications_of_its_own_policy(paths: RunPaths) -> None:
    clock = Clock()
    trainer, watch = PolicyRegistry(paths), WindowWatch(paths, "policy", clock=clock)
    trainer.window(versions=0, groups_per_version=4)
    assert watch.limit() == 4
    trainer.publish(0, weights="w")
    trainer.publish(9, weights="w", name="lora")
    clock.now_s += LOOK_S
    assert watch.limit() == 4
    trainer.publish(1, weights="w1")
    clock.now_s += LOOK_S
    assert watch.limit() == 8


def test_watch_starts_nothing_before_it_could_read_and_keeps_what_it_read(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    PolicyRegistry(paths).window(groups=4)
    watch = WindowWatch(paths, "policy", clock=clock)
    read = Path.read_bytes

    def stalled(path: Path) -> bytes:
        if path == paths.window_now:
            raise OSError(116, "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stalled)
    with pytest.raises(OSError, match="Stale"):
        watch.limit()
    monkeypatch.undo()
    assert watch.limit() == 4
    monkeypatch.setattr(Path, "read_bytes", stalled)
    clock.now_s += LOOK_S
    assert watch.limit() == 4
    assert "window=unread" in caplog.text


def test_watch_does_not_take_a_name_that_is_missing_for_no_window(paths: RunPaths) -> None:
    """A client that looked before the window was set may have cached that there is none."""
    clock = Clock()
    PolicyRegistry(paths).window(groups=4)
    watch = WindowWatch(paths, "policy", clock=clock)
    assert watch.limit() == 4
    paths.window_now.unlink()
    clock.now_s += LOOK_S
    assert watch.limit() == 4
