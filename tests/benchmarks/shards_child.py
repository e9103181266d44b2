"""One measurement in a process of its own; prints one line of JSON.

    python -m tests.benchmarks.shards_child ACTION FORMAT RAW FOLDER

Formats of hpcroll need its environment, the others that of the peers. FOLDER holds the stored set in `data`
and a small one in `small`, which pays for imports and caches before anything is timed.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import shards_arrow as tables
from tests.benchmarks import shards_formats as plain
from tests.benchmarks.shards_damage import damage
from tests.benchmarks.shards_process import peak_memory_mb

SMALL = 8
"""Rows of the small set, and of a group."""
_RANDOM_READS = 300
_RANDOM_S = 15.0
"""After that long the reads done so far must do."""
SEED = 1


def formats() -> dict[str, Callable[[], Any]]:
    """Every format by the key that processes call it by; imports what it needs when made."""
    from tests.benchmarks import shards_loaders as loaders

    def ours(name: str, **options: Any) -> Callable[[], Any]:
        def make() -> Any:
            from tests.benchmarks import shards_ours

            return getattr(shards_ours, name)(**options)

        return make

    return {
        "level0": ours("Level0", dictionary=False),
        "level0_dictionary": ours("Level0", dictionary=True),
        "packed": ours("Packed"),
        "packed_float16": ours("Packed", float16=True),
        "packed_default": ours("Packed", level=6),
        "jsonl": plain.JsonLines,
        "msgpack": plain.MessagePack,
        "sqlite": plain.Sqlite,
        "arrow": tables.Arrow,
        "parquet_8": lambda: tables.Parquet(8),
        "parquet_8_dictionary": lambda: tables.Parquet(8, dictionary=True),
        "parquet_64": lambda: tables.Parquet(64),
        "parquet_64_dictionary": lambda: tables.Parquet(64, dictionary=True),
        "parquet_64_planes": lambda: tables.Parquet(64, split=True),
        "parquet_64_planes_6": lambda: tables.Parquet(64, split=True, level=6),
        "mds": loaders.Mosaic,
        "webdataset": loaders.WebDataset,
        "litdata_chunk": lambda: loaders.LitData("chunk"),
        "litdata_batch": lambda: loaders.LitData("batch"),
        "array_record_1": lambda: loaders.ArrayRecord(1),
        "array_record_8": lambda: loaders.ArrayRecord(8),
    }


OURS = ("level0", "level0_dictionary", "packed", "packed_float16", "packed_default")


def write(form: Any, raw: Path, folder: Path) -> dict[str, Any]:
    """Stores the set; `seconds` of it all, or of what the format itself says."""
    from tests.benchmarks.shards_rawset import RawSet

    rows = RawSet.load(raw)
    for name in ("small", "data"):
        place = folder / name
        place.mkdir(parents=True)
        began_s = time.perf_counter()
        form.write(rows.head(min(SMALL, len(rows))) if name == "small" else rows, place)
        taken_s = time.perf_counter() - began_s
    own_s = getattr(form, "write_s", taken_s)
    figures = {"seconds": own_s, "stored_bytes": stored_bytes(folder / "data"), "raw_bytes": rows.size_bytes}
    durable_s = getattr(form, "durable_s", None)
    if durable_s:
        figures["durable_ms"] = (np.percentile(durable_s, [50, 99]) * 1e3).tolist()
    return figures


def read(form: Any, raw: Path, folder: Path, *, record: bool) -> dict[str, Any]:
    """Reads every row, opening included; memory is that of the process above importing numpy."""
    keys = _keys(raw)
    _warm_up(form, folder, keys, record=record)
    with _own_copy(form, folder / "data") as data:
        began_s = time.perf_counter()
        reader = form.open(data, keys)
        count, tokens = 0, 0
        for row in reader.rows(record=record):
            _touch(row)
            count += 1
            tokens += len(row.ids)
        taken_s = time.perf_counter() - began_s
        memory_mb = peak_memory_mb() - BASE_MB
        reader.close()
    if count != len(keys):
        raise SystemExit(f"{form.name}: {count} rows of {len(keys)}")
    return {"seconds": taken_s, "rows": count, "tokens": tokens, "memory_mb": memory_mb}


def random_reads(form: Any, raw: Path, folder: Path) -> dict[str, Any]:
    """Whole rows in seeded order from a freshly opened reader, the files in memory."""
    keys = _keys(raw)
    _warm_up(form, folder, keys, record=True)
    with _own_copy(form, folder / "data") as data:
        began_s = time.perf_counter()
        reader = form.open(data, keys)
        open_s = time.perf_counter() - began_s
        order = random.Random(SEED).sample(range(len(keys)), min(_RANDOM_READS, len(keys)))
        taken_s: list[float] = []
        for index in order:
            started_s = time.perf_counter()
            _touch(reader.one(index))
            taken_s.append(time.perf_counter() - started_s)
            if time.perf_counter() - began_s > _RANDOM_S and len(taken_s) >= 3:
                break
        reader.close()
    p50, p99 = (np.percentile(taken_s, [50, 99]) * 1e3).tolist()
    return {"open_ms": open_s * 1e3, "p50_ms": p50, "p99_ms": p99, "reads": len(taken_s)}


def limit(raw: Path) -> dict[str, Any]:
    """What zstd alone takes for the tokens of the set, out of memory: two frames for each group, one of ids
    and masks, one of log-probabilities, as they are."""
    import zstandard

    from tests.benchmarks.shards_rawset import RawSet

    rows = RawSet.load(raw)
    compress = zstandard.ZstdCompressor(level=plain.LEVEL).compress
    frames, start = [], 0
    for last in range(SMALL - 1, len(rows) + SMALL - 1, SMALL):
        end = int(rows.ends[min(last, len(rows) - 1)])
        part = {name: column[start:end].tobytes() for name, column in rows.columns.items()}
        frames += [compress(part["ids"] + part["sampled"] + part["loss_mask"]), compress(part["logprobs"])]
        start = end
    decompress = zstandard.ZstdDecompressor().decompress
    began_s = time.perf_counter()
    for frame in frames:
        decompress(frame)
    return {"seconds": time.perf_counter() - began_s}


def stored_bytes(folder: Path) -> int:
    """Of the data; of a run only of its shards and packs."""
    run = folder / "run"
    parts = [run / "shards", run / "packs"] if run.exists() else [folder]
    return sum(path.stat().st_size for part in parts for path in part.rglob("*") if path.is_file())


def _keys(raw: Path) -> list[str]:
    keys: list[str] = json.loads((raw / "facts.json").read_bytes())["keys"]
    return keys


def _touch(row: Any) -> None:
    """Looks at both ends of every array, so that none is left unread."""
    for array in (row.ids, row.logprobs, row.sampled, row.loss_mask):
        array[0], array[-1]


def _warm_up(form: Any, folder: Path, keys: list[str], *, record: bool) -> None:
    with _own_copy(form, folder / "small") as small:
        reader = form.open(small, keys[:SMALL])
        for row in reader.rows(record=record):
            _touch(row)
        _touch(reader.one(0))
        reader.close()


@contextmanager
def _own_copy(form: Any, folder: Path) -> Iterator[Path]:
    """The folder itself, or a copy where reading leaves something behind in it."""
    if not getattr(form, "unpacks", False):
        yield folder
        return
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _actions(form: Any, raw: Path, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "write", lambda: write(form, raw, folder)
    yield "tokens", lambda: read(form, raw, folder, record=False)
    yield "full", lambda: read(form, raw, folder, record=True)
    yield "random", lambda: random_reads(form, raw, folder)
    yield "limit", lambda: limit(raw)
    yield "damage", lambda: damage(form, folder / "data", _keys(raw))


def main() -> None:
    action, name, raw, folder = sys.argv[1:]
    form = formats()[name]()
    result = dict(_actions(form, Path(raw), Path(folder)))[action]()
    print(json.dumps({"name": form.name, **result}))


BASE_MB = peak_memory_mb()

if __name__ == "__main__":
    main()
