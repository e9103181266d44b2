"""A set as every format gets it: plain arrays and JSON, in files that each measuring process loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpcroll.contract import Trajectory

_COLUMNS = {"ids": "<u4", "logprobs": "<f4", "sampled": "u1", "loss_mask": "u1"}
BYTES_PER_TOKEN = 4 + 4 + 1 + 1


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory: its segments' arrays in a row, its reward (NaN: none) and its record as JSON.

    A reader of tokens alone leaves `record` empty.
    """

    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    sampled: NDArray[np.uint8]
    loss_mask: NDArray[np.uint8]
    reward: float
    record: bytes = b""
    key: str = ""

    def digest(self) -> str:
        """Of all that was stored but the key."""
        parts = [np.ascontiguousarray(getattr(self, name), kind).data for name, kind in _COLUMNS.items()]
        whole = b"".join([*parts, np.float64(self.reward).tobytes(), self.record])
        return hashlib.blake2b(whole, digest_size=16).hexdigest()


@dataclass
class RawSet:
    """The rows of a set, sorted by group; arrays and records are views of one buffer each."""

    columns: dict[str, NDArray[Any]]
    ends: NDArray[np.int64]
    records: bytes | memoryview
    record_ends: NDArray[np.int64]
    rewards: NDArray[np.float64]
    keys: list[str]
    groups: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Row:
        start, end = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        first = int(self.record_ends[index - 1]) if index else 0
        return Row(
            **{name: column[start:end] for name, column in self.columns.items()},
            reward=float(self.rewards[index]),
            record=bytes(self.records[first : int(self.record_ends[index])]),
            key=self.keys[index],
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def size_bytes(self) -> int:
        """Raw bytes: arrays, rewards and records."""
        return self.tokens * BYTES_PER_TOKEN + len(self.records) + 8 * len(self)

    def head(self, count: int) -> RawSet:
        """The first `count` rows."""
        end, record_end = int(self.ends[count - 1]), int(self.record_ends[count - 1])
        return RawSet(
            columns={name: column[:end] for name, column in self.columns.items()},
            ends=self.ends[:count],
            records=self.records[:record_end],
            record_ends=self.record_ends[:count],
            rewards=self.rewards[:count],
            keys=self.keys[:count],
            groups=self.groups[:count],
        )

    @classmethod
    def load(cls, folder: Path) -> RawSet:
        facts = json.loads((folder / "facts.json").read_bytes())
        return cls(
            columns={name: np.fromfile(folder / name, kind) for name, kind in _COLUMNS.items()},
            ends=np.fromfile(folder / "ends", "<i8"),
            records=(folder / "records").read_bytes(),
            record_ends=np.fromfile(folder / "record_ends", "<i8"),
            rewards=np.fromfile(folder / "rewards", "<f8"),
            keys=facts["keys"],
            groups=facts["groups"],
        )


@dataclass
class RawWriter:
    """Writes a set row by row, so that it need not fit into memory."""

    folder: Path
    _keys: list[str] = field(default_factory=list)
    _groups: list[str] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _record_ends: list[int] = field(default_factory=list)
    _rewards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._files = {name: (self.folder / name).open("wb") for name in (*_COLUMNS, "records")}

    def add(self, trajectory: Trajectory) -> None:
        record = trajectory.record
        text = record.to_json().encode()
        for name, kind in _COLUMNS.items():
            for tokens in trajectory.tokens:
                self._files[name].write(np.ascontiguousarray(getattr(tokens, name), kind).data)
        self._files["records"].write(text)
        length = sum(segment.length for segment in record.segments)
        self._ends.append(length + (self._ends[-1] if self._ends else 0))
        self._record_ends.append(len(text) + (self._record_ends[-1] if self._record_ends else 0))
        self._rewards.append(float("nan") if record.reward is None else record.reward)
        self._keys.append(record.rollout_id)
        self._groups.append(record.group_id)

    def finish(self) -> None:
        if len(set(self._keys)) < len(self._keys):
            raise SystemExit("two trajectories of the set have one rollout id")
        for file in self._files.values():
            file.close()
        np.array(self._ends, "<i8").tofile(self.folder / "ends")
        np.array(self._record_ends, "<i8").tofile(self.folder / "record_ends")
        np.array(self._rewards, "<f8").tofile(self.folder / "rewards")
        facts = {"keys": self._keys, "groups": self._groups}
        (self.folder / "facts.json").write_text(json.dumps(facts))


def save(folder: Path, trajectories: Iterable[Trajectory]) -> None:
    writer = RawWriter(folder)
    for trajectory in trajectories:
        writer.add(trajectory)
    writer.finish()
