"""prime-rl: rank files of packed micro-batches, and a bridge that keeps pace with its trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from hpcroll.config import Strict
from hpcroll.errors import ShardError
from hpcroll.exporters.base import Bridge, Fact, Part, Unit
from hpcroll.exporters.micro_batches import MicroBatch, distribute, micro_batches
from hpcroll.exporters.packages import need
from hpcroll.exporters.prime_rl_bridge import PrimeRlBridge, step_of
from hpcroll.exporters.row_exporter import LOST_IN_ROWS
from hpcroll.exporters.rows import Row, training_rows
from hpcroll.policy import PolicyRegistry
from hpcroll.shards import Column


class PrimeRlOptions(Strict):
    """Options of the format `prime-rl`."""

    normalise_std: bool = False
    """Divide advantages by the group's standard deviation (n - 1 in the denominator, plus 1e-6)."""
    world: int = Field(default=1, ge=1)
    """Data-parallel ranks of the trainer: one file per rank and step."""
    groups: int = Field(default=16, ge=1)
    """Groups per training step."""
    seq_len: int = Field(default=32768, ge=1)
    """Tokens of a micro-batch, at most: the trainer's `model.seq_len`."""
    too_long: Literal["error", "truncate"] = "error"
    """What becomes of a segment longer than `seq_len`; the trainer's own orchestrator truncates."""
    pad_to_multiple_of: int = Field(default=1, ge=1)
    """Micro-batches are padded to a multiple of so many tokens."""
    env_name: str = Field(default="hpcroll", min_length=1)
    """The environment's name in the trainer's metrics; `all` is reserved there."""
    async_level: int = Field(default=1, ge=0)
    """Step N is written once policy version N - 1 - `async_level` was broadcast; when following."""
    lineage: str = "main"
    """Lineage under which broadcast versions are published; when following."""


class PrimeRl:
    """`rollouts/step_<N>/rank_<R>.bin`, N from 1: the msgpack array of the rank's `MicroBatch`es.

    All token arrays have length T, entry i is of token i; the trainer shifts. Log-probabilities are 0.0 where
    nothing was sampled. A rollout's advantage stands at each of its tokens. Every rank gets the same number
    of micro-batches, filled up with copies that nothing is trained on.
    """

    Options: ClassVar[type[Strict]] = PrimeRlOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        *LOST_IN_ROWS,
        Fact.SAMPLED,
        Fact.VERSIONS,
        Fact.LINEAGE,
        Fact.REWARD,
        Fact.GROUP,
        Fact.ROLLOUT,
        Fact.WEIGHT,
        Fact.STATUS,
        Fact.TASK,
    )
    source: ClassVar[str] = (
        "PrimeIntellect-ai/prime-rl 559b447 (2026-08-21): src/prime_rl/transports/rollouts/types.py, "
        "filesystem.py, transports/weights/filesystem.py, orchestrator/orchestrator.py"
    )
    columns: ClassVar[frozenset[Column]] = frozenset({Column.TOKENS, Column.RECORD})
    unit: ClassVar[Unit] = Unit.GROUP

    def __init__(self, options: PrimeRlOptions) -> None:
        self._options = options
        self._msgpack = need("msgpack", "prime-rl")

    @property
    def groups_per_part(self) -> int | None:
        return self._options.groups

    def names(self, number: int) -> tuple[str, ...]:
        folder = f"rollouts/step_{step_of(number)}"
        return tuple(f"{folder}/rank_{rank}.bin" for rank in range(self._options.world))

    def files(self, part: Part) -> Iterator[tuple[str, bytes]]:
        rows = [self._fitting(row) for row in training_rows(part, normalise_std=self._options.normalise_std)]
        batches = micro_batches(rows, self._options.seq_len, env_name=self._options.env_name)
        padded = [batch.padded(self._options.pad_to_multiple_of) for batch in batches]
        ranks: list[list[MicroBatch]] = distribute(padded, self._options.world)
        for name, batch_list in zip(self.names(part.number), ranks, strict=True):
            yield name, self._msgpack.packb([batch.fields() for batch in batch_list])

    def bridge(self, out: Path, policy: PolicyRegistry) -> Bridge:
        return PrimeRlBridge(
            out, policy, async_level=self._options.async_level, lineage=self._options.lineage
        )

    def _fitting(self, row: Row) -> Row:
        if len(row) > self._options.seq_len and self._options.too_long == "error":
            raise ShardError(
                f"rollout {row.rollout.rollout_id}: segment {row.segment_index} has {len(row)} tokens, more "
                f"than seq_len {self._options.seq_len}; raise seq_len, or set too_long=truncate"
            )
        return row
