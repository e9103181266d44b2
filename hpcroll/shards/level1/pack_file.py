"""One packed shard, opened for reading: an index of its rows, and blocks that are read when asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import RolloutRef
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level1.chain import Manifest
from hpcroll.shards.level1.rows import RowColumns


class OpenPack:
    """A pack opened for reading; keep it open while its rows are read. One thread at a time.

    Rows are numbered from 0 in file order, and those of one group stand together. Memory: the index, and
    one or two blocks. Raises `OSError` where the file is gone.
    """

    rows: RowColumns
    """The index: a numpy array per column, one entry per row."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        """`manifest` is what the chain says of the file; without it the file's own trailer is believed.

        A damaged index is rebuilt from the blocks, and `index_damaged` is true then.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many rows there are."""
        raise NotImplementedError

    def close(self) -> None: ...

    def place(self, row: int) -> Place:
        """The level-0 entry that the row came from, which names it on both levels."""
        raise NotImplementedError

    def ref(self, row: int) -> RolloutRef:
        raise NotImplementedError

    def read(self, row: int, columns: Collection[Column]) -> StoredTrajectory:
        """The row's trajectory with `columns`, whose bytes are checked now.

        Cheap for rows of one block in a row: the block that was read last is kept. The arrays of a
        trajectory are views of its block's arrays. Raises `ShardCorruptError` where the bytes of the block
        are not as written; other blocks are not concerned.
        """
        raise NotImplementedError

    def blocks(self) -> Iterator[range]:
        """The rows of each block, in file order."""
        raise NotImplementedError

    def row_of(self, place: Place) -> int | None:
        """The row that came from the level-0 entry at `place`; None where this pack does not hold it."""
        raise NotImplementedError

    def row_of_rollout(self, ref: RolloutRef) -> int | None:
        """The row of rollout `ref`; None where this pack does not hold it."""
        raise NotImplementedError

    def rows_of_group(self, group_id: str) -> NDArray[np.int64]:
        """The rows of a group in this pack, ascending; empty where it holds none."""
        raise NotImplementedError

    def places_of_shard(self, incarnation: str, shard_index: int) -> NDArray[np.int64]:
        """Offsets of the entries of one level-0 shard that this pack holds, ascending."""
        raise NotImplementedError

    def damage(self) -> list[str]:
        """Reads every byte; what does not match its checksum, one line each. Empty: all is as written."""
        raise NotImplementedError
