"""What every format of the benchmark offers, and those made of general-purpose parts.

Settings are the fair ones: zstd at level 3 everywhere, rows in the order of their groups, the library's own
reader. No module here imports hpcroll: the peers live in an environment of their own.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.benchmarks.shards_rawset import RawSet, Row

LEVEL = 3
ARRAYS = {"ids": "<u4", "logprobs": "<f4", "sampled": "u1", "loss_mask": "u1"}


class Reader(Protocol):
    """An opened data set."""

    def rows(self, *, record: bool) -> Iterator[Row]:
        """Every row in order; with `record` all of it, else only what a trainer needs."""
        ...

    def one(self, index: int) -> Row:
        """Row `index`, all of it."""
        ...

    def close(self) -> None: ...


class Format(Protocol):
    """A way to store a set in a folder of its own."""

    name: str

    def write(self, rows: RawSet, folder: Path) -> None: ...

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        """`keys` name the rows, in order."""
        ...


def pack_row(row: Row) -> dict[str, Any]:
    """The row as named bytes and a number, for formats that store a map."""
    arrays = {name: np.ascontiguousarray(getattr(row, name), kind).tobytes() for name, kind in ARRAYS.items()}
    return {**arrays, "reward": row.reward, "record": row.record}


def unpack_row(fields: dict[str, Any]) -> Row:
    """The inverse of `pack_row`, without copying."""
    arrays = {name: np.frombuffer(fields[name], kind) for name, kind in ARRAYS.items()}
    return Row(**arrays, reward=float(fields["reward"]), record=fields.get("record") or b"")


class JsonLines:
    """JSON lines in one zstd stream, by orjson; NaN is null. A row is found by reading all before it."""

    name = "JSONL.zst"

    def write(self, rows: RawSet, folder: Path) -> None:
        import orjson
        import zstandard

        compressor = zstandard.ZstdCompressor(level=LEVEL)
        path = folder / "rows.jsonl.zst"
        with path.open("wb") as file, compressor.stream_writer(file, closefd=False) as stream:
            for row in rows:
                arrays = {name: getattr(row, name) for name in ARRAYS}
                fields = {**arrays, "reward": row.reward, "record": orjson.Fragment(row.record)}
                stream.write(orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _JsonLinesReader(folder / "rows.jsonl.zst")


class _JsonLinesReader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self, *, record: bool) -> Iterator[Row]:
        return (self._row(line) for line in self._lines())

    def one(self, index: int) -> Row:
        for number, line in enumerate(self._lines()):
            if number == index:
                return self._row(line)
        raise IndexError(index)

    def close(self) -> None:
        pass

    def _lines(self) -> Iterator[bytes]:
        import zstandard

        with self._path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            rest: list[bytes] = []
            while data := stream.read(1 << 20):
                first, *more = data.split(b"\n")
                rest.append(first)
                if more:
                    yield b"".join(rest)
                    yield from more[:-1]
                    rest = [more[-1]]
            if any(rest):
                raise ValueError("the last line has no end")

    def _row(self, line: bytes) -> Row:
        import orjson

        fields = orjson.loads(line)
        arrays = {name: np.array(fields[name], kind) for name, kind in ARRAYS.items()}  # null becomes NaN
        reward = float("nan") if fields["reward"] is None else fields["reward"]
        text = orjson.dumps(fields["record"], option=orjson.OPT_SORT_KEYS)
        return Row(**arrays, reward=reward, record=text)


class MessagePack:
    """msgpack, one zstd frame a record; offsets beside it."""

    name = "msgpack + zstd per record"

    def write(self, rows: RawSet, folder: Path) -> None:
        import msgpack
        import zstandard

        compressor, ends = zstandard.ZstdCompressor(level=LEVEL), [0]
        with (folder / "rows").open("wb") as file:
            for row in rows:
                ends.append(ends[-1] + file.write(compressor.compress(msgpack.packb(pack_row(row)))))
        np.array(ends, "<i8").tofile(folder / "ends")

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _MessagePackReader(folder)


class _MessagePackReader:
    def __init__(self, folder: Path) -> None:
        import msgpack
        import zstandard

        self._file = (folder / "rows").open("rb", buffering=0)
        self._ends = np.fromfile(folder / "ends", "<i8").tolist()
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._unpack: Callable[[bytes], dict[str, Any]] = msgpack.unpackb

    def rows(self, *, record: bool) -> Iterator[Row]:
        return (self.one(index) for index in range(len(self._ends) - 1))

    def one(self, index: int) -> Row:
        self._file.seek(self._ends[index])
        data = self._file.read(self._ends[index + 1] - self._ends[index])
        return unpack_row(self._unpack(self._decompress(data)))

    def close(self) -> None:
        self._file.close()


class Sqlite:
    """A table whose values are zstd frames: the arrays of a row in one, its record in another."""

    name = "SQLite, zstd values"
    _head = struct.Struct("<q")

    def write(self, rows: RawSet, folder: Path) -> None:
        import zstandard

        compress = zstandard.ZstdCompressor(level=LEVEL).compress
        database = sqlite3.connect(folder / "rows.sqlite")
        try:
            database.execute(
                "CREATE TABLE rows (number INTEGER PRIMARY KEY, reward REAL, tokens BLOB, record BLOB)"
            )
            with database:
                for number, row in enumerate(rows):
                    arrays = b"".join(
                        np.ascontiguousarray(getattr(row, name), kind).tobytes()
                        for name, kind in ARRAYS.items()
                    )
                    tokens = compress(self._head.pack(len(row.ids)) + arrays)
                    values = (number, row.reward, tokens, compress(row.record))
                    database.execute("INSERT INTO rows VALUES (?, ?, ?, ?)", values)
        finally:
            database.close()

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _SqliteReader(folder / "rows.sqlite")


class _SqliteReader:
    def __init__(self, path: Path) -> None:
        import zstandard

        self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self._decompress = zstandard.ZstdDecompressor().decompress

    def rows(self, *, record: bool) -> Iterator[Row]:
        columns = "reward, tokens, record" if record else "reward, tokens"
        return (self._row(*found) for found in self._database.execute(f"SELECT {columns} FROM rows"))

    def one(self, index: int) -> Row:
        query = "SELECT reward, tokens, record FROM rows WHERE number = ?"
        found = self._database.execute(query, (index,)).fetchone()
        if found is None:
            raise IndexError(index)
        return self._row(*found)

    def close(self) -> None:
        self._database.close()

    def _row(self, reward: float | None, tokens: bytes, record: bytes | None = None) -> Row:
        raw = self._decompress(tokens)
        (length,) = Sqlite._head.unpack_from(raw)
        arrays, start = {}, Sqlite._head.size
        for name, kind in ARRAYS.items():
            arrays[name] = np.frombuffer(raw, kind, length, start)
            start += arrays[name].nbytes
        text = self._decompress(record) if record is not None else b""
        return Row(**arrays, reward=float("nan") if reward is None else reward, record=text)
