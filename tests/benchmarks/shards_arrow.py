"""Arrow IPC and Parquet, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.shards_formats import ARRAYS, LEVEL, Reader
from tests.benchmarks.shards_rawset import RawSet, Row


class Arrow:
    """Arrow IPC: a record batch of 8 rows, which is a group; buffers zstd, the file mapped."""

    name = "Arrow IPC zstd, batches of a group"
    _batch = 8

    def write(self, rows: RawSet, folder: Path) -> None:
        import pyarrow as pa

        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=LEVEL))
        path = str(folder / "rows.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, arrow_schema(), options=options) as writer:
            for start in range(0, len(rows), self._batch):
                writer.write_batch(arrow_batch(rows, start, min(start + self._batch, len(rows))))

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _ArrowReader(folder / "rows.arrow", self._batch)


class _ArrowReader:
    def __init__(self, path: Path, batch: int) -> None:
        import pyarrow as pa

        self._map = pa.memory_map(str(path))
        self._all = pa.ipc.open_file(self._map)
        wanted = [self._all.schema.get_field_index(name) for name in (*ARRAYS, "reward")]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        self._tokens = pa.ipc.open_file(self._map, options=options)
        self._batch = batch

    def rows(self, *, record: bool) -> Iterator[Row]:
        file = self._all if record else self._tokens
        for number in range(file.num_record_batches):
            yield from arrow_rows(file.get_batch(number))

    def one(self, index: int) -> Row:
        return arrow_row(self._all.get_batch(index // self._batch), index % self._batch)

    def close(self) -> None:
        self._map.close()


def arrow_schema() -> Any:
    import pyarrow as pa

    kinds = {"ids": pa.uint32(), "logprobs": pa.float32(), "sampled": pa.uint8(), "loss_mask": pa.uint8()}
    fields = [(name, pa.list_(kind)) for name, kind in kinds.items()]
    return pa.schema([*fields, ("reward", pa.float64()), ("record", pa.binary())])


def arrow_batch(rows: RawSet, start: int, end: int) -> Any:
    """Rows [start, end) as a record batch whose values are views of the set's arrays."""
    import pyarrow as pa

    schema = arrow_schema()
    before = int(rows.ends[start - 1]) if start else 0
    last = int(rows.ends[end - 1])
    offsets = pa.array(np.concatenate([[0], rows.ends[start:end] - before]).astype(np.int32))
    lists = [
        pa.ListArray.from_arrays(
            offsets, pa.array(rows.columns[name][before:last]), type=schema.field(name).type
        )
        for name in ARRAYS
    ]
    records = pa.array([rows[index].record for index in range(start, end)], pa.binary())
    return pa.record_batch([*lists, pa.array(rows.rewards[start:end]), records], schema=schema)


def arrow_rows(batch: Any) -> Iterator[Row]:
    """The rows of a batch (or of a table of one chunk), arrays as views of it."""
    lists = {name: batch.column(name) for name in ARRAYS}
    values = {name: column.values.to_numpy() for name, column in lists.items()}
    rewards = batch.column("reward").to_numpy(zero_copy_only=False)
    records = batch.column("record") if "record" in batch.schema.names else None
    ends = lists["ids"].offsets.to_numpy().tolist()
    for index, (start, end) in enumerate(pairwise(ends)):
        record = records[index].as_py() if records is not None else b""
        arrays = {name: column[start:end] for name, column in values.items()}
        yield Row(**arrays, reward=float(rewards[index]), record=record)


def arrow_row(batch: Any, index: int) -> Row:
    return next(arrow_rows(batch.slice(index, 1)))


class Parquet:
    """Parquet by pyarrow: zstd pages, row groups of `group` rows, with or without dictionary encoding."""

    def __init__(
        self, group: int, *, dictionary: bool = False, split: bool = False, level: int = LEVEL
    ) -> None:
        shown = "zstd" if level == LEVEL else f"zstd {level}"
        self.name = f"Parquet {shown}, {group} rows" + ", dictionary" * dictionary + ", byte planes" * split
        self._level = level
        self._group = group
        self._dictionary = dictionary
        self._split = split

    def write(self, rows: RawSet, folder: Path) -> None:
        import pyarrow.parquet as pq

        with pq.ParquetWriter(
            folder / "rows.parquet",
            arrow_schema(),
            compression="zstd",
            compression_level=self._level,
            use_dictionary=[f"{name}.list.element" for name in ARRAYS if name != "logprobs"]
            if self._dictionary
            else False,
            use_byte_stream_split=["logprobs.list.element"] if self._split else False,
            data_page_size=8 << 20,
            write_statistics=False,
        ) as writer:
            for start in range(0, len(rows), self._group):
                writer.write_batch(arrow_batch(rows, start, min(start + self._group, len(rows))))

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _ParquetReader(folder / "rows.parquet", self._group)


class _ParquetReader:
    def __init__(self, path: Path, group: int) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path)
        self._group = group

    def rows(self, *, record: bool) -> Iterator[Row]:
        columns = [*ARRAYS, "reward", *(["record"] if record else [])]
        for number in range(self._file.num_row_groups):
            yield from self._of(number, columns)

    def one(self, index: int) -> Row:
        rows = list(self._of(index // self._group, [*ARRAYS, "reward", "record"]))
        return rows[index % self._group]

    def close(self) -> None:
        self._file.close()

    def _of(self, number: int, columns: list[str]) -> Iterator[Row]:
        table = self._file.read_row_group(number, columns=columns, use_threads=False)
        for batch in table.combine_chunks().to_batches():
            yield from arrow_rows(batch)
