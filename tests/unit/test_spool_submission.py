"""A submission key stands for one content; workers see all of it or nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from hpcroll.contract import RolloutRef, Task
from hpcroll.errors import ConfigError, CorruptRecordError, SchemaVersionError, SpoolError
from hpcroll.spool import Segment, Spool, segment_name
from hpcroll.spool import submission as submission_module
from tests.spools import TWO_LEGS, make_spool, make_tasks, submit


def test_same_key_and_content_is_one_submission(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    first, second = submit(spool), submit(spool)
    assert first.created
    assert not second.created
    assert first.refs == second.refs
    assert len(spool.segments()) == 1


@pytest.mark.parametrize(("tasks", "samples"), [(5, 2), (4, 3), (3, 2)])
def test_same_key_with_other_content_is_refused_by_name(tmp_path: Path, tasks: int, samples: int) -> None:
    spool = make_spool(tmp_path)
    submit(spool, key="epoch7")
    with pytest.raises(ConfigError, match="'epoch7' stands for other content") as caught:
        submit(spool, tasks, samples=samples, key="epoch7")
    assert "a new key" in str(caught.value)
    assert spool.segments()[0].size == 8


def test_racing_submitters_make_one_submission(tmp_path: Path) -> None:
    spools = [make_spool(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(submit, spools))
    assert sum(result.created for result in results) == 1
    assert len({result.refs for result in results}) == 1


def test_rollouts_keep_the_order_of_their_tasks(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submission = submit(spool, tasks=3, samples=2)
    rollouts = [spool.rollout(ref) for ref in submission.refs]
    assert [rollout.task.task_id for rollout in rollouts] == [
        *("task-0", "task-0", "task-1", "task-1", "task-2", "task-2")
    ]
    assert [rollout.sample_index for rollout in rollouts] == [0, 1, 0, 1, 0, 1]
    assert len({rollout.group_id for rollout in rollouts}) == 3
    assert submission.segment.task_index("task-2") == 2


def test_segments_stand_in_the_order_of_submission_for_everyone(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    for key in ("c", "a", "b"):
        submit(spool, key=key)
    assert [segment.key for segment in Spool.open(tmp_path).segments()] == ["c", "a", "b"]


def test_directories_of_every_leg_exist_before_the_segment_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    publish = submission_module.publish

    def check_first(path: Path, data: bytes) -> bool:
        for leg in ("init+run", "eval"):
            for ordinal in (0, 4096, 8999):
                ref = RolloutRef(segment=segment_name("epoch0"), ordinal=ordinal)
                assert spool.paths.claim_directory(leg, ref).is_dir()
                assert spool.paths.done_directory(leg, ref).is_dir()
                assert spool.paths.bundle_file(leg, ref, 1).parent.is_dir()
        return publish(path, data)

    monkeypatch.setattr(submission_module, "publish", check_first)
    assert submit(spool, tasks=1125, samples=8).created


@pytest.mark.parametrize(
    ("tasks", "samples", "key", "message"),
    [
        (make_tasks(2) + make_tasks(1), 1, "k", "tasks 0 and 2 .* 'task-0'"),
        ([], 1, "k", "has no tasks"),
        (make_tasks(1), 0, "k", "samples must be at least 1"),
        (make_tasks(1), 1, "", "needs a key"),
    ],
)
def test_bad_submissions_are_refused_and_nothing_is_visible(
    tmp_path: Path, tasks: list[Task], samples: int, key: str, message: str
) -> None:
    spool = make_spool(tmp_path)
    with pytest.raises(ConfigError, match=message):
        spool.submit(tasks, samples=samples, key=key)
    assert spool.segments() == ()


def test_closed_run_takes_no_submission(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    spool.wishes.close()
    with pytest.raises(SpoolError, match="is closed"):
        submit(spool)


def test_tasks_survive_any_text(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    prompt = 'line\nnext\u2028\x85 \\ " \U0001f600 \x00'
    task = Task(task_id="odd \u00e9", handler="math", prompt=prompt, spec={"deep": {"list": [1, None, 0.5]}})
    submission = spool.submit([task], samples=1, key="schl\u00fcssel / ../..")
    assert Spool.open(tmp_path).rollout(submission.refs[0]).task == task


def segment_text(spool: Spool, segment: Segment) -> tuple[Path, list[str]]:
    path = spool.paths.segment_file(segment.name)
    return path, zstandard.decompress(path.read_bytes()).decode().splitlines()


def rewrite(path: Path, lines: list[str]) -> None:
    path.write_bytes(zstandard.compress("\n".join(lines).encode() + b"\n"))


def test_changed_task_is_noticed(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    path, lines = segment_text(spool, submit(spool).segment)
    rewrite(path, [*lines[:-1], lines[-1].replace("3 + 1", "3 + 2")])
    with pytest.raises(CorruptRecordError, match=str(path)):
        Spool.open(tmp_path).segments()


def test_missing_task_is_noticed(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    path, lines = segment_text(spool, submit(spool).segment)
    rewrite(path, lines[:-1])
    with pytest.raises(CorruptRecordError, match="3 of 4 tasks"):
        Spool.open(tmp_path).segments()


def test_no_flipped_bit_and_no_cut_goes_unnoticed(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    segment = submit(spool, tasks=2).segment
    path = spool.paths.segment_file(segment.name)
    whole = path.read_bytes()
    flipped = [
        whole[:n] + bytes([whole[n] ^ 1 << bit]) + whole[n + 1 :] for n in range(len(whole)) for bit in (4,)
    ]
    for damaged in flipped + [whole[:n] for n in range(len(whole))]:
        path.write_bytes(damaged)
        try:
            read = Spool.open(tmp_path).segments()[0]
        except (CorruptRecordError, SchemaVersionError):
            continue
        # zstd's frame header has a bit that no reader looks at.
        assert (read.header, read.lines) == (segment.header, segment.lines)


def test_segment_of_a_newer_hpcroll_is_refused_by_version(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    path, lines = segment_text(spool, submit(spool).segment)
    rewrite(path, [lines[0].replace('"schema_version":"1.1"', '"schema_version":"3.1"'), *lines[1:]])
    with pytest.raises(SchemaVersionError, match=r"SegmentHeader has schema version 3\.1"):
        Spool.open(tmp_path).segments()


def test_unknown_rollouts_are_refused_by_name(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    name = submit(spool).segment.name
    with pytest.raises(SpoolError, match=f"{name}/8: .* only 8 rollouts"):
        spool.rollout(RolloutRef(segment=name, ordinal=8))
    with pytest.raises(SpoolError, match="no submission 0000000000000000"):
        spool.rollout(RolloutRef(segment="0" * 16, ordinal=0))
