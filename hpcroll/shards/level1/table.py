"""A table: named numpy columns in one buffer, read back as views of it.

Layout, little-endian (docs/reference/shard-format.md):

    I   columns    how many
    then per column:  B bytes of the name, the name (ASCII), B dtype (index into the list below), Q entries
    then per column:  zeros up to a multiple of 8 bytes from the table's start, then its entries

    dtypes: 0 u1, 1 u2, 2 u4, 3 u8, 4 i4, 5 i8, 6 f4, 7 f8
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.errors import ShardCorruptError

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<BQ")
_DTYPES = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8"))
_ALIGNMENT = 8
_STRINGS = "strings"
_STRING_ENDS = "string_ends"

Columns = Mapping[str, NDArray[Any]]


def encode_table(columns: Columns) -> bytes:
    """The bytes of `columns`, each one-dimensional and of one of the listed dtypes."""
    directory = bytearray(_COUNT.pack(len(columns)))
    for name, column in columns.items():
        directory += bytes([len(name)]) + name.encode("ascii")
        directory += _ENTRY.pack(_DTYPES.index(column.dtype.newbyteorder("<")), len(column))
    parts, size = [bytes(directory)], len(directory)
    for column in columns.values():
        padding = -size % _ALIGNMENT
        parts += [bytes(padding), column.tobytes()]
        size += padding + column.nbytes
    return b"".join(parts)


def decode_table(data: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """The columns of `data`, read-only views of it; raises `ShardCorruptError` where it is no table."""
    try:
        (count,) = _COUNT.unpack_from(data)
        position, entries = _COUNT.size, []
        for _ in range(count):
            length = data[position]
            name = bytes(data[position + 1 : position + 1 + length]).decode("ascii")
            code, size = _ENTRY.unpack_from(data, position + 1 + length)
            entries.append((name, _DTYPES[code], size))
            position += 1 + length + _ENTRY.size
        columns = {}
        for name, dtype, size in entries:
            position += -position % _ALIGNMENT
            columns[name] = np.frombuffer(data, dtype, size, position)
            position += size * dtype.itemsize
    except (struct.error, IndexError, ValueError) as error:
        raise ShardCorruptError(f"{len(data)} bytes are no table of columns: {error}") from error
    return columns


class StringTable(Sequence[str]):
    """Strings by number; each is decoded when it is first asked for."""

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.uint32]) -> None:
        self._data = data
        self._ends = ends
        self._numbers: dict[str, int] | None = None
        self._texts: dict[int, str] = {}

    @classmethod
    def of(cls, columns: Columns) -> StringTable:
        """The strings of a decoded table."""
        return cls(columns[_STRINGS], columns[_STRING_ENDS])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: Any) -> Any:
        text = self._texts.get(number)
        if text is None:
            end = int(self._ends[number])
            start = int(self._ends[number - 1]) if number else 0
            text = self._data[start:end].tobytes().decode("utf-8", "surrogatepass")
            self._texts[int(number)] = text
        return text

    def texts(self) -> list[str]:
        """All of them, by number."""
        ends: list[int] = self._ends.tolist()
        whole = self._data.tobytes()
        return [
            whole[start:end].decode("utf-8", "surrogatepass")
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def number(self, text: str) -> int | None:
        """The number of `text`; None where it is not in the table."""
        if self._numbers is None:
            self._numbers = {known: number for number, known in enumerate(self.texts())}
        return self._numbers.get(text)


class StringCollector:
    """Gives each distinct string a number, from 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def columns(self) -> dict[str, NDArray[Any]]:
        """The collected strings, as columns for `encode_table`."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in self._numbers]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.uint32)[1:]
        return {_STRINGS: np.frombuffer(b"".join(encoded), np.uint8), _STRING_ENDS: ends}
