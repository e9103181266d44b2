"""Dictionaries: made once for a run, agreed on, kept twice, and never in the way of a commit."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import zstandard

from hpcroll.api.configuring import read_config
from hpcroll.config import ShardConfig
from hpcroll.contract import Trajectory
from hpcroll.errors import ConfigError, ShardCorruptError, ShardError
from hpcroll.shards import ShardWriter, check_dictionary, encode_trajectory, open_run
from hpcroll.shards.format.codec import encode_frames, raw_frames, read_trajectory
from hpcroll.shards.format.dictionaries import (
    Dictionaries,
    Dictionary,
    dictionaries_of,
    pack_dictionaries,
    parse_dictionaries,
)
from hpcroll.shards.format.dictionary_training import train
from hpcroll.shards.format.frames import FrameKind, parse_header
from hpcroll.shards.level0.dictionary_keeper import SAMPLES
from tests.shard_runs import SEGMENT, ShardRun, trajectory

ENOUGH = 3 * SAMPLES


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def alike(ordinal: int, *, incarnation: str = "w0") -> Trajectory:
    """A trajectory of about 70 kB whose record shares a long text with every other."""
    shared = random.Random(0).randbytes(30_000).hex()
    return trajectory(ordinal, incarnation=incarnation, turns=4, extra={"prompt": shared})


def named(data: bytes) -> set[int]:
    """The dictionaries that a record names."""
    header = parse_header(data)
    assert header is not None
    return {frame.dictionary for frame in header.frames} - {0}


def write(run: ShardRun, writer: ShardWriter, incarnation: str, ordinals: range) -> None:
    for ordinal in ordinals:
        address = writer.append(alike(ordinal, incarnation=incarnation))
        writer.sync()
        if run.confirm(ordinal, incarnation):
            writer.mark([address])


def train_in(run: ShardRun, incarnation: str = "w0") -> None:
    """A worker that writes until the run has dictionaries, and ends."""
    with run.writer(incarnation) as writer:
        write(run, writer, incarnation, range(ENOUGH))
    run.end(incarnation)


def records(run: ShardRun, incarnation: str) -> list[bytes]:
    data, found, start = run.paths.shard_file(incarnation, 0).read_bytes(), [], 0
    while start < len(data):
        header = parse_header(data[start:])
        assert header is not None
        found.append(data[start : start + header.record_bytes])
        start += header.record_bytes
    return found


def test_later_records_are_smaller_and_read_as_they_were_written(run: ShardRun) -> None:
    train_in(run)
    with run.writer("w1") as writer:
        write(run, writer, "w1", range(ENOUGH, ENOUGH + 8))
    plain, trained = records(run, "w0")[0], records(run, "w1")
    assert named(plain) == set()
    assert all(len(named(record)) >= 2 for record in trained)
    assert max(map(len, trained)) < 0.7 * len(plain)
    stored = {item.ref.ordinal: item for item in open_run(run.paths.root)}
    assert sorted(stored) == list(range(ENOUGH + 8))
    for ordinal, item in stored.items():
        assert item.record == alike(ordinal, incarnation=item.incarnation).record
        expected = alike(ordinal, incarnation=item.incarnation).tokens
        assert [part.ids.tolist() for part in item.tokens] == [part.ids.tolist() for part in expected]


def test_summary_and_log_probabilities_need_no_dictionary(run: ShardRun) -> None:
    train_in(run)
    with run.writer("w1") as writer:
        write(run, writer, "w1", range(ENOUGH, ENOUGH + 1))
    header = parse_header(records(run, "w1")[0])
    assert header is not None
    assert header.frame(FrameKind.SUMMARY).dictionary == header.frame(FrameKind.LOGPROBS).dictionary == 0


def test_workers_that_train_at_once_agree(run: ShardRun) -> None:
    writers = {name: run.writer(name) for name in ("w0", "w1", "w2")}
    starts = dict(zip(writers, range(0, 3 * ENOUGH, ENOUGH), strict=True))

    def work(name: str) -> None:
        for ordinal in range(starts[name], starts[name] + ENOUGH):
            writers[name].append(alike(ordinal, incarnation=name))

    threads = [threading.Thread(target=work, args=(name,)) for name in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers.values():
        writer.close()
    known = {each.number for each in dictionaries_of(run.paths).newest().values()}
    assert known
    assert sorted(path.name for path in run.paths.shards.glob("dict.*")) == ["dict.0", "dict.0.copy"]
    assert {number for name in writers for record in records(run, name) for number in named(record)} <= known


def test_record_is_written_plain_where_a_dictionary_does_not_fit_into_memory() -> None:
    class Unaffordable(Dictionary):
        def prepared(self, *_: object) -> NoReturn:
            raise zstandard.ZstdError("Allocation error : not enough memory")

    plain = encode_trajectory(alike(0))
    record = alike(0)
    dictionaries = {kind: Unaffordable.of(kind, b"x" * 1000) for kind in (FrameKind.TOKENS, FrameKind.TEXT)}
    assert encode_frames(record, raw_frames(record), level=3, dictionaries=dictionaries) == plain


def test_missing_dictionary_is_named(run: ShardRun) -> None:
    train_in(run)
    with run.writer("w1") as writer:
        write(run, writer, "w1", range(ENOUGH, ENOUGH + 1))
    for path in run.paths.shards.glob("dict.*"):
        path.unlink()
    dictionaries_of.cache_clear()
    stored = open_run(run.paths.root).get(f"{SEGMENT}/{ENOUGH}")
    assert stored.summary.group_size == 4
    with pytest.raises(
        ShardError, match=rf"{SEGMENT}/{ENOUGH} .*needs dictionary [0-9a-f]{{8}}.*shards/dict"
    ):
        _ = stored.record


def test_damaged_dictionary_is_read_from_its_copy(run: ShardRun) -> None:
    train_in(run)
    with run.writer("w1") as writer:
        write(run, writer, "w1", range(ENOUGH, ENOUGH + 1))
    path = run.paths.dictionary_file(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    dictionaries_of.cache_clear()
    stored = open_run(run.paths.root).get(f"{SEGMENT}/{ENOUGH}")
    assert stored.record == alike(ENOUGH, incarnation="w1").record
    run.paths.dictionary_file(0, copy=True).write_bytes(data)
    dictionaries_of.cache_clear()
    with pytest.raises(ShardCorruptError, match=r"dict\.0 .*damaged"):
        _ = open_run(run.paths.root).get(f"{SEGMENT}/{ENOUGH}").record


def test_damaged_dictionaries_do_not_stop_a_worker(run: ShardRun, caplog: pytest.LogCaptureFixture) -> None:
    run.paths.dictionary_file(0).write_bytes(b"something else")
    with caplog.at_level(logging.WARNING), run.writer("w0") as writer:
        write(run, writer, "w0", range(ENOUGH))
    assert [record.message for record in caplog.records if "without dictionaries" in record.message]
    assert len(open_run(run.paths.root)) == ENOUGH


def test_off_writes_none(run: ShardRun) -> None:
    with run.writer("w0", dictionary="off") as writer:
        write(run, writer, "w0", range(ENOUGH))
    assert list(run.paths.shards.glob("dict.*")) == []


def test_bare_off_of_yaml_is_understood() -> None:
    assert ShardConfig.model_validate({"dictionary": False}).dictionary == "off"


def test_dictionaries_of_another_run_are_taken_over(run: ShardRun, tmp_path: Path) -> None:
    train_in(run)
    other = ShardRun.create(tmp_path / "other")
    with other.writer("w0", dictionary=str(run.paths.dictionary_file(0))) as writer:
        write(other, writer, "w0", range(1))
    assert other.paths.dictionary_file(0).read_bytes() == run.paths.dictionary_file(0).read_bytes()
    assert named(records(other, "w0")[0]) == {
        each.number for each in Dictionaries(run.paths).newest().values()
    }


def test_a_file_that_is_none_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    wrong = tmp_path / "dict.0"
    wrong.write_bytes(b"x" * 100)
    for choice in (wrong, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"shards\.dictionary: .*auto, off"):
            check_dictionary(str(choice))
    check_dictionary("auto")
    check_dictionary("off")


def test_relative_paths_are_those_of_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("shards: {dictionary: other/dict.0}\n")
    assert read_config(tmp_path / "run.yaml").shards.dictionary == str(tmp_path / "other" / "dict.0")
    (tmp_path / "run.yaml").write_text("shards: {dictionary: off}\n")
    assert read_config(tmp_path / "run.yaml").shards.dictionary == "off"


def test_every_flipped_bit_of_the_file_is_noticed(tmp_path: Path) -> None:
    contents = train([raw_frames(alike(ordinal)) for ordinal in range(SAMPLES)])
    small = {kind: data[:300] for kind, data in contents.items()}
    data = bytearray(pack_dictionaries(small))
    assert [each.kind for each in parse_dictionaries(bytes(data), tmp_path)] == sorted(small)
    chance = random.Random(0)
    for position in range(len(data)):
        data[position] ^= (flip := 1 << chance.randrange(8))
        with pytest.raises(ShardCorruptError):
            parse_dictionaries(bytes(data), tmp_path)
        data[position] ^= flip


def test_record_needs_the_dictionaries_it_was_written_with(run: ShardRun) -> None:
    contents = train([raw_frames(alike(ordinal)) for ordinal in range(SAMPLES)])
    run.paths.dictionary_file(0).write_bytes(pack_dictionaries(contents))
    known = Dictionaries(run.paths)
    original = alike(SAMPLES)
    data = encode_frames(original, raw_frames(original), level=3, dictionaries=known.newest())
    assert read_trajectory(parse_header(data, known), data).record == original.record
    with pytest.raises(ShardError, match="needs dictionary"):
        read_trajectory(parse_header(data), data)
    assert named(encode_trajectory(original)) == set(), "a bundle travels alone"
