"""The vectors of packs: a reader written from the reference page alone finds in them what ours finds."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.record_json import parse_json
from hpcroll.shards.format.stored import Column
from hpcroll.shards.level1.pack_file import OpenPack
from tests.vectors import level1_reader
from tests.vectors.make_level1 import LEVEL1, PACKS


def ours(path: Path) -> dict[str, Any]:
    """What hpcroll reads of a vector, in the vectors' own words."""
    with OpenPack(path) as pack:
        return {"rows": [row_of(pack, row) for row in range(len(pack))], "index_damaged": pack.index_damaged}


def row_of(pack: OpenPack, row: int) -> dict[str, Any]:
    stored = pack.read(row, [])
    summary, place = stored.summary, stored.place
    return {
        "rollout_id": stored.rollout_id,
        "attempt": stored.attempt,
        "place": [place.shard.incarnation, place.shard.index, place.offset],
        "group": summary.group_id,
        "status": summary.status,
        "trainable": summary.trainable,
        "reward_valid": summary.reward_valid,
        "reward": summary.reward,
        "lengths": list(summary.lengths),
        "version_low": list(summary.version_low),
        "tokens": tokens_of(pack, row),
        "record": json_of(pack, row, 4),
        "text": json_of(pack, row, 5),
    }


def tokens_of(pack: OpenPack, row: int) -> Any:
    try:
        tokens = pack.read(row, [Column.TOKENS]).tokens
    except ShardCorruptError:
        return "damaged"
    return [
        {
            "ids": part.ids.tolist(),
            "sampled": part.sampled.tolist(),
            "loss_mask": part.loss_mask.tolist(),
            "logprobs": [None if np.isnan(value) else float(value) for value in part.logprobs],
        }
        for part in tokens
    ]


def json_of(pack: OpenPack, row: int, kind: int) -> Any:
    try:
        block = pack.load(pack.block_of(row), frozenset({Column.RECORD, Column.TEXT}))
        raw = block.ragged(kind, row)
    except ShardCorruptError:
        return "damaged"
    return None if raw is None else parse_json(raw)


@pytest.mark.parametrize("name", PACKS)
def test_both_readers_find_in_a_vector_what_it_says(name: str) -> None:
    expected = json.loads((LEVEL1 / f"{name}.json").read_text())
    path = LEVEL1 / f"{name}.pack"
    assert level1_reader.read_pack(path.read_bytes()) == expected
    assert ours(path) == expected
    assert expected["rows"]


def test_the_second_reader_imports_nothing_of_hpcroll() -> None:
    tree = ast.parse(Path(level1_reader.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) <= {
        "numpy",
        "xxhash",
        "zstandard",
    }
