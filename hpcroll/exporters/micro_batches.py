"""prime-rl's micro-batches: rows laid end to end, the same number for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcroll.exporters.rows import Row, filled_logprobs, token_temperatures

_PADDING_ID = 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N tokens of one or more sequences; the fields and their order are prime-rl's `MicroBatch`."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    inference_logprobs: list[float] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    sequence_lengths: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    env_names: list[str] = field(default_factory=list)
    rl_weights: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input_ids)

    def add(self, row: Row, length: int, env_name: str) -> None:
        """Appends the first `length` tokens of `row`."""
        tokens = row.tokens
        self.input_ids.extend(tokens.ids[:length].tolist())
        self.loss_mask.extend(tokens.loss_mask[:length].astype(bool).tolist())
        self.advantages.extend([row.advantage] * length)
        self.inference_logprobs.extend(filled_logprobs(tokens)[:length].tolist())
        self.position_ids.extend(range(length))
        self.sequence_lengths.append(length)
        temperatures = token_temperatures(row.rollout.record, row.segment_index)
        self.temperatures.extend(temperatures[:length].tolist())
        self.env_names.extend([env_name] * length)
        self.rl_weights.extend([row.rollout.summary.rollout_weight] * length)

    def padded(self, multiple: int) -> MicroBatch:
        """The same with tokens at its end that nothing is trained on, up to a multiple of `multiple`."""
        missing = -len(self) % multiple
        if not missing:
            return self
        return MicroBatch(
            input_ids=self.input_ids + [_PADDING_ID] * missing,
            loss_mask=self.loss_mask + [False] * missing,
            advantages=self.advantages + [0.0] * missing,
            inference_logprobs=self.inference_logprobs + [0.0] * missing,
            position_ids=self.position_ids + list(range(missing)),
            sequence_lengths=[*self.sequence_lengths[:-1], self.sequence_lengths[-1] + missing],
            temperatures=self.temperatures + [1.0] * missing,
            env_names=self.env_names + [""] * missing,
            rl_weights=self.rl_weights + [0.0] * missing,
        )

    def dummy(self) -> MicroBatch:
        """A copy that nothing is trained on."""
        nothing = [0.0] * len(self)
        return replace(self, advantages=nothing, loss_mask=[False] * len(self), rl_weights=nothing)

    def fields(self) -> list[Any]:
        """The positional fields as they are on the wire; trailing ones that are absent are left out."""
        fields: list[Any] = [
            self.input_ids,
            self.loss_mask,
            self.advantages,
            self.inference_logprobs,
            self.position_ids,
            self.sequence_lengths,
            self.temperatures,
            self.env_names,
            self.sequence_lengths,  # `seq_lens`: the same without a split over context-parallel ranks
        ]
        if any(weight != 1.0 for weight in self.rl_weights):
            # ref_logprobs, routed_experts, mm_kwargs and mm_token_type_ids stand before it.
            fields += [None, None, None, None, self.rl_weights]
        return fields


def micro_batches(rows: Sequence[Row], seq_len: int, *, env_name: str) -> list[MicroBatch]:
    """`rows` in as few micro-batches of at most `seq_len` tokens as first fit, longest first, finds."""
    batches: list[MicroBatch] = []
    for row in sorted(rows, key=len, reverse=True):
        length = min(len(row), seq_len)
        for batch in batches:
            if len(batch) + length <= seq_len:
                batch.add(row, length, env_name)
                break
        else:
            batches.append(MicroBatch())
            batches[-1].add(row, length, env_name)
    return batches


def distribute(batches: Sequence[MicroBatch], world: int) -> list[list[MicroBatch]]:
    """The same number for each of `world` ranks, heavy ones spread; dummies fill up."""
    ordered = sorted(batches, key=len, reverse=True)
    missing = -len(ordered) % world
    ordered += [ordered[-1].dummy()] * missing
    ranks: list[list[MicroBatch]] = [[] for _ in range(world)]
    for index, batch in enumerate(ordered):
        turn, rank = divmod(index, world)
        # There and back, so that no rank gets the heaviest of every turn.
        ranks[rank if turn % 2 == 0 else world - 1 - rank].append(batch)
    return ranks
