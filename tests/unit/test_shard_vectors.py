"""The test vectors: a reader that was written from the reference page alone finds in them what ours finds."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from hpcroll.contract import Ragged
from hpcroll.errors import SchemaVersionError, ShardCorruptError, ShardError
from hpcroll.shards.format.codec import read_extra_columns, read_summary, read_tokens
from hpcroll.shards.format.commit_log import parse_marks
from hpcroll.shards.format.frames import FrameKind, Header, open_frame
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.record_json import parse_json, parse_record
from hpcroll.shards.level0.scan import records_of
from hpcroll.shards.level0.shard_file import OpenShard
from tests.shard_runs import ShardRun
from tests.vectors import level0_reader, make_level0
from tests.vectors.make_level0 import LEVEL0, SHARDS

NAMES = (*SHARDS, "log")


def expected(name: str) -> Any:
    return json.loads((LEVEL0 / f"{name}.json").read_text())


def ours(name: str, run: ShardRun, *, dictionaries: bool = True) -> dict[str, Any]:
    """What hpcroll reads of a vector, in the vectors' own words."""
    run.paths.shard_file("v", 0).write_bytes((LEVEL0 / f"{name}.shard").read_bytes())
    if name == "dictionary" and dictionaries:
        run.paths.dictionary_file(0).write_bytes((LEVEL0 / "dictionary.dict").read_bytes())
    found: list[dict[str, Any]] = []
    damaged: list[list[int]] = []
    end = 0
    with OpenShard(run.paths, ShardName("v", 0)) as shard:
        for offset, header in records_of(shard):
            if offset > end:
                damaged.append([end, offset])
            end = offset + header.record_bytes
            if end <= shard.size:
                found.append(
                    {"offset": offset, **columns_of(header, shard.read(offset, header.record_bytes))}
                )
            else:
                end = offset
        if end < shard.size:
            damaged.append([end, shard.size])
    return {"records": found, "damaged": damaged}


def columns_of(header: Header, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"rollout_id": header.ref.rollout_id, "attempt": header.attempt}
    readers: dict[str, Callable[[], Any]] = {
        "summary": lambda: summary_of(header, data),
        "tokens": lambda: tokens_of(header, data),
        "record": lambda: parse_json(open_frame(header, FrameKind.RECORD, data)),
        "text": lambda: parse_json(open_frame(header, FrameKind.TEXT, data)),
        "columns": lambda: extra_of(header, data),
    }
    for name, read in readers.items():
        try:
            found[name] = read()
        except ShardCorruptError:
            found[name] = "damaged"
        except ShardError as error:
            found[name] = "no dictionary" if "needs dictionary" in str(error) else str(error)
    return found


def summary_of(header: Header, data: bytes) -> dict[str, Any]:
    values = read_summary(header, data)._asdict()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def tokens_of(header: Header, data: bytes) -> list[dict[str, Any]]:
    return [
        {
            "ids": part.ids.tolist(),
            "sampled": part.sampled.tolist(),
            "loss_mask": part.loss_mask.tolist(),
            "logprobs": level0_reader.plain(part.logprobs),
        }
        for part in read_tokens(header, read_summary(header, data), data)
    ]


def extra_of(header: Header, data: bytes) -> dict[str, Any]:
    def plain(part: Ragged | np.ndarray[Any, Any]) -> Any:
        if isinstance(part, Ragged):
            return {"counts": part.counts.tolist(), "values": level0_reader.plain(part.values)}
        return level0_reader.plain(part)

    extra = read_extra_columns(header, data)
    return {name: [plain(part) for part in parts] for name, parts in extra.items()}


@pytest.mark.parametrize("name", NAMES)
def test_independent_reader_finds_what_the_vector_says(name: str) -> None:
    assert make_level0.expected(name) == expected(name)


def test_independent_reader_knows_nothing_of_hpcroll() -> None:
    tree = ast.parse(Path(level0_reader.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy", "xxhash", "zstandard"}


@pytest.mark.parametrize("name", [name for name in SHARDS if name != "newer_major"])
def test_hpcroll_finds_what_the_vector_says(name: str, tmp_path: Path) -> None:
    assert ours(name, ShardRun.create(tmp_path / "run")) == expected(name)


def test_records_are_those_that_went_in(tmp_path: Path) -> None:
    inside = [
        {name: value for name, value in record.items() if name not in ("offset", "columns")}
        for record in expected("plain")["records"]
    ]
    assert inside == make_level0.contents()


@pytest.mark.parametrize("name", ["dictionary", "newer_minor", "columns"])
def test_other_ways_to_write_the_same_records_change_nothing_in_them(name: str) -> None:
    def core(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key not in ("offset", "columns")}

    same = [core(record) for record in expected("plain")["records"]]
    assert [core(record) for record in expected(name)["records"]] == same


def test_newer_major_is_refused(tmp_path: Path) -> None:
    assert expected("newer_major") == {"refused": "major version 2"}
    with pytest.raises(SchemaVersionError, match="shard format 2"):
        ours("newer_major", ShardRun.create(tmp_path / "run"))


def test_without_the_dictionaries_the_rest_is_readable(tmp_path: Path) -> None:
    alone = ours("dictionary", ShardRun.create(tmp_path / "run"), dictionaries=False)
    independent = level0_reader.read_shard((LEVEL0 / "dictionary.shard").read_bytes(), {})
    assert alone == independent
    for with_it, without in zip(expected("dictionary")["records"], alone["records"], strict=True):
        assert without["record"] == "no dictionary"
        assert (without["summary"], without["tokens"]) == (with_it["summary"], with_it["tokens"])


def test_marks_are_read_and_the_damaged_one_is_noticed() -> None:
    marks, damaged = parse_marks((LEVEL0 / "log.log").read_bytes())
    found = [
        {
            "shard": mark.shard_index,
            "offset": mark.offset,
            "length": mark.length,
            "rollout_id": mark.ref.rollout_id,
            "attempt": mark.attempt,
            "record": f"{mark.checksum:016x}",
        }
        for mark in marks
    ]
    assert {"marks": found, "damaged": damaged} == expected("log")
    assert damaged == 1
    offsets = [record["offset"] for record in expected("plain")["records"]]
    assert [mark.offset for mark in marks] == [offsets[0], offsets[2]]


def test_damage_is_noticed_where_it_is_and_costs_nothing_else() -> None:
    sound, hurt = expected("plain")["records"], expected("damaged")
    first, second, last = hurt["records"]
    assert {**first, "text": sound[0]["text"]} == sound[0]
    assert first["text"] == second["tokens"] == "damaged"
    assert {**second, "tokens": sound[1]["tokens"]} == sound[1]
    assert hurt["damaged"] == [[sound[2]["offset"], sound[3]["offset"]]]
    assert last == sound[3]


def test_records_of_the_vectors_are_of_the_schema() -> None:
    for record in expected("plain")["records"]:
        parsed = parse_record(
            json.dumps(record["record"]).encode("utf-8", "surrogatepass"), json.dumps(record["text"]).encode()
        )
        assert parsed.rollout_id == record["rollout_id"]


@pytest.mark.parametrize("name", SHARDS)
def test_generator_makes_the_committed_bytes(name: str) -> None:
    made = SHARDS[name]()
    if ".".join(map(str, zstandard.ZSTD_VERSION)) == make_level0.ZSTD_VERSION:
        assert made == (LEVEL0 / f"{name}.shard").read_bytes()
    elif name != "newer_major":
        known = level0_reader.read_dictionaries((LEVEL0 / "dictionary.dict").read_bytes())
        assert len(level0_reader.read_shard(made, known)["records"]) == len(expected(name)["records"])
