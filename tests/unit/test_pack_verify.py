"""`verify_run` over packs: what breaks a promise is named, what a dead packer leaves is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcroll.errors import ShardCorruptError
from hpcroll.shards import encode_trajectory, open_run, verify_run
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.level1.chain import InputRange, Manifest, PackChain
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from tests.shard_runs import ShardRun, ref, trajectory

W0 = ShardName("w0", 0)


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    """Two groups of four, packed one after the other; the worker has ended."""
    run = ShardRun.create(tmp_path / "run")
    with run.writer("w0") as writer:
        for group in (range(4), range(4, 8)):
            run.commit(writer, "w0", group, turns=1)
            Packer(run.paths).pack()
    run.end("w0")
    return run


def chain_of(run: ShardRun) -> PackChain:
    chain = PackChain(run.paths)
    chain.refresh()
    return chain


def remove_level0(run: ShardRun) -> None:
    for path in run.paths.shards.iterdir():
        path.unlink()


def test_packed_run_has_no_problem_with_and_without_level_0(run: ShardRun) -> None:
    report = verify_run(run.paths.root)
    assert (report.problems, report.packs, report.packed, report.committed) == ([], 2, 8, 8)
    assert (report.shards, report.removed_shards, report.orphans, report.lost) == (1, 0, 0, 0)
    tokens = report.action_tokens
    Retention(run.paths).retain()
    report = verify_run(run.paths.root)
    assert (report.problems, report.packed, report.committed, report.lost) == ([], 8, 8, 0)
    assert (report.shards, report.removed_shards, report.action_tokens) == (0, 1, tokens)


def test_halved_log_probabilities_are_no_difference(run: ShardRun) -> None:
    with run.writer("w1") as writer:
        run.commit(writer, "w1", range(8, 12))
    Packer(run.paths, PackOptions(float16=True)).pack()
    assert verify_run(run.paths.root).problems == []


def test_data_file_that_no_manifest_names_is_counted(run: ShardRun) -> None:
    run.paths.pack_file(2, "0123456789abcdef").write_bytes(b"half a pack")
    report = verify_run(run.paths.root)
    assert (report.problems, report.orphans) == ([], 1)


def _lose_data(run: ShardRun) -> None:
    chain_of(run).data_file(chain_of(run)[1]).unlink()


def _lose_manifest(run: ShardRun) -> None:
    run.paths.pack_manifest(0).unlink()


def _damage_both_lines(run: ShardRun) -> None:
    path = run.paths.pack_manifest(1)
    path.write_bytes(path.read_bytes().replace(b'"rows":4', b'"rows":5'))


def _lose_done(run: ShardRun) -> None:
    run.paths.done_link(run.leg, ref(2)).unlink()


def _replace_original(run: ShardRun) -> None:
    shard = run.paths.shard_file("w0", 0)
    whole = shard.read_bytes()
    old = encode_trajectory(trajectory(7, turns=1))
    shard.write_bytes(whole[: -len(old)] + encode_trajectory(trajectory(7, turns=1, harness="other")))


def _append(run: ShardRun, **changes: object) -> None:
    """A third manifest, which names the second one's data file."""
    chain = chain_of(run)
    manifest = replace(chain[1], generation=2, **changes)  # type: ignore[arg-type]
    run.paths.pack_manifest(2).write_bytes(manifest.to_bytes())


def _begin_elsewhere(run: ShardRun) -> None:
    end = chain_of(run).frontier(W0).seen
    _append(run, inputs={W0: InputRange(end + 1, end + 2)})


def _leave_what_is_packed(run: ShardRun) -> None:
    end = chain_of(run).frontier(W0).seen
    _append(run, inputs={W0: InputRange(end, end, (0,))})


def _pack_twice(run: ShardRun) -> None:
    end = chain_of(run).frontier(W0).seen
    _append(run, inputs={W0: InputRange(end, end)})


def _pass_over(run: ShardRun) -> None:
    with run.writer("w1") as writer:
        (address,) = run.commit(writer, "w1", [8])
    _append(run, inputs={ShardName("w1", 0): InputRange(0, address.length)})


def _remove_too_much(run: ShardRun) -> None:
    with run.writer("w1") as writer:
        run.commit(writer, "w1", [12, *range(8, 12)])
    Packer(run.paths).pack()
    run.paths.shard_file("w1", 0).unlink()


def _damage_dictionaries(run: ShardRun) -> None:
    for copy in (False, True):
        run.paths.dictionary_file(0, copy=copy).write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("break_it", "told", "lost"),
    [
        (_lose_data, "pack 1 cannot be opened", 0),
        (_lose_manifest, "no reader comes to this pack", 0),
        (_damage_both_lines, "its checksum does not match", 0),
        (_lose_done, "`done` names nobody", 0),
        (_replace_original, "its record is not that of its level-0 original", 0),
        (_begin_elsewhere, "where packs stand at", 0),
        (_leave_what_is_packed, "which are packed before or beyond its end", 0),
        (_pack_twice, "is packed twice", 0),
        (_pass_over, "packs have passed it without holding it", 0),
        (_remove_too_much, "the shard is gone, and packs do not hold all of it", 1),
        (_damage_dictionaries, "is no file of dictionaries, or is damaged", 0),
    ],
)
def test_broken_promise_is_named(
    run: ShardRun, break_it: Callable[[ShardRun], None], told: str, lost: int
) -> None:
    break_it(run)
    report = verify_run(run.paths.root)
    assert any(told in problem for problem in report.problems), report.problems
    assert report.lost == lost


def test_lost_rollouts_are_counted_where_level_0_is_gone(run: ShardRun) -> None:
    remove_level0(run)
    _lose_data(run)
    report = verify_run(run.paths.root)
    assert (report.lost, report.committed) == (4, 4)


def test_manifest_of_a_newer_major_is_refused_by_name(run: ShardRun) -> None:
    path = run.paths.pack_manifest(1)
    manifest = Manifest.from_bytes(path.read_bytes(), path=path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcroll.shards.level1.chain.SCHEMA", "2.0")
        path.write_bytes(manifest.to_bytes())
    assert any("use the hpcroll that wrote it" in problem for problem in verify_run(run.paths.root).problems)


def test_reader_names_a_pack_whose_file_is_gone(run: ShardRun) -> None:
    _lose_data(run)
    with pytest.raises(ShardCorruptError, match=r"is gone, which holds 4 rollouts \(pack 1\); put it back"):
        list(open_run(run.paths.root))
