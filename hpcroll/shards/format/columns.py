"""Optional token columns: any names, dtypes and shapes, one array per segment, skipped unless asked for.

A record that has some holds a directory frame, JSON: for each column its name, numpy's name of its dtype
(`<f4`), whether it is ragged, and the shape of each segment's array; then a frame per column, in that order,
kinds 16 and up. A column's frame is its arrays in a row, C order, little-endian. A ragged one has shapes
[T, V] and holds for each segment u32 counts (T,), then V values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import ExtraColumn, Ragged
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.shards.format.frames import FIRST_EXTRA, LAST_EXTRA, FrameKind

_NUMBERS = "biuf"


def column_frames(columns: Mapping[str, ExtraColumn], lengths: Sequence[int]) -> dict[int, bytes]:
    """The frames of `columns` by kind; none where there are none.

    Raises `ShardError` where a column's arrays do not have T = `lengths` tokens, hold no plain numbers, or
    where there are too many columns.
    """
    if not columns:
        return {}
    if len(columns) > LAST_EXTRA - FIRST_EXTRA + 1:
        raise ShardError(f"{len(columns)} extra columns; a record holds {LAST_EXTRA - FIRST_EXTRA + 1}")
    directory, frames = [], {}
    for kind, (name, column) in enumerate(columns.items(), FIRST_EXTRA):
        entry, frames[kind] = _column(name, column, lengths)
        directory.append(entry)
    return {FrameKind.COLUMNS: json.dumps(directory, separators=(",", ":")).encode(), **frames}


def read_columns(
    directory: bytes | memoryview | None,
    open_kind: Callable[[int], bytes | memoryview],
    names: Collection[str] | None = None,
) -> dict[str, ExtraColumn]:
    """The extra columns `names` (None: all) that a record has, as read-only views.

    `directory`: its frame, None where the record has none. `open_kind` gives the raw bytes of a frame, and is
    asked for the chosen columns only.
    """
    entries = json.loads(bytes(directory)) if directory is not None else []
    return {
        entry["name"]: _arrays(entry, open_kind(kind))
        for kind, entry in enumerate(entries, FIRST_EXTRA)
        if names is None or entry["name"] in names
    }


def _column(name: str, column: ExtraColumn, lengths: Sequence[int]) -> tuple[dict[str, Any], bytes]:
    """A column's entry in the directory, and its frame."""
    ragged = any(isinstance(part, Ragged) for part in column)
    shapes, pieces, dtypes = [], [], set()
    for part in column:
        if isinstance(part, Ragged) != ragged:
            raise ShardError(f"extra column {name!r} is ragged in some segments only")
        if isinstance(part, Ragged):
            if part.counts.ndim != 1 or part.values.shape != (int(part.counts.sum()),):
                raise ShardError(f"extra column {name!r}: its counts do not add up to its values")
            shapes.append((len(part.counts), len(part.values)))
            pieces.append(np.ascontiguousarray(part.counts, "<u4").tobytes())
        else:
            shapes.append(part.shape)
        values = part.values if isinstance(part, Ragged) else part
        dtypes.add(values.dtype.newbyteorder("<"))
        pieces.append(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes())
    if [shape[:1] for shape in shapes] != [(length,) for length in lengths]:
        raise ShardError(f"extra column {name!r}: its arrays do not match the segments' lengths")
    if len(dtypes) > 1 or any(dtype.kind not in _NUMBERS for dtype in dtypes):
        raise ShardError(f"extra column {name!r}: its arrays must be numbers of one dtype, not {dtypes}")
    dtype = dtypes.pop().str if dtypes else "|u1"
    return {"name": name, "dtype": dtype, "ragged": ragged, "shapes": shapes}, b"".join(pieces)


def _arrays(entry: dict[str, Any], raw: bytes | memoryview) -> ExtraColumn:
    dtype, start = np.dtype(entry["dtype"]), 0
    found: list[NDArray[Any] | Ragged] = []

    def take(dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        nonlocal start
        array = np.frombuffer(raw, dtype, prod(shape), start).reshape(shape)
        start += array.nbytes
        return array

    try:
        for shape in entry["shapes"]:
            if entry["ragged"]:
                counts = take(np.dtype("<u4"), shape[:1])
                found.append(Ragged(counts, take(dtype, shape[1:])))
            else:
                found.append(take(dtype, shape))
    except ValueError as error:
        raise ShardCorruptError(f"extra column {entry['name']!r} is shorter than it says: {error}") from error
    return tuple(found)
