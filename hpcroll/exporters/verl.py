"""verl: the tensors of a rollout's `DataProto`, prompts and responses apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from hpcroll.config import Strict
from hpcroll.exporters.base import Fact
from hpcroll.exporters.row_exporter import LOST_IN_ROWS, RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, filled_logprobs
from hpcroll.exporters.tensors import Array, pad_left, pad_right, to_safetensors


class VerlOptions(TrainingOptions):
    """Options of the format `verl`."""

    pad_token_id: int = Field(default=0, ge=0)
    """Id that prompts and responses are padded with."""


class Verl(RowExporter):
    """`part-<number>.safetensors`: B rows, prompts of at most P tokens padded on their left, responses of at
    most R padded on their right; a response begins with the first sampled token.

    int64: `prompts` (B, P), `responses` and `response_mask` (B, R), `input_ids`, `attention_mask` and
    `position_ids` (B, P + R). float32 (B, R): `rollout_log_probs`, 0.0 where nothing was sampled,
    `rm_scores`, the reward at the last token, `advantages` and `returns`, the group's. Entry i of these is
    of token i. The metadata's `group_id` is `uid`.
    """

    Options: ClassVar[type[Strict]] = VerlOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        *LOST_IN_ROWS,
        Fact.SAMPLED,
        Fact.VERSIONS,
    )
    source: ClassVar[str] = (
        "verl 0.9.1 (volcengine/verl): verl/experimental/agent_loop/agent_loop.py (_postprocess), "
        "verl/protocol.py, verl/trainer/ppo/core_algos.py"
    )
    name_format: ClassVar[str] = "part-{number:05d}.safetensors"
    packages: ClassVar[tuple[str, ...]] = ("safetensors.numpy",)

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        pad = self.options.pad_token_id
        prompts = [row.tokens.ids[: row.prompt_length] for row in rows]
        responses = [row.tokens.ids[row.prompt_length :] for row in rows]
        attention = np.concatenate(
            [
                pad_left([np.ones(len(ids)) for ids in prompts], np.int64),
                pad_right([np.ones(len(ids)) for ids in responses], np.int64),
            ],
            axis=1,
        )
        left, right = pad_left(prompts, np.int64, pad), pad_right(responses, np.int64, pad)
        mask = pad_right([row.tokens.loss_mask[row.prompt_length :] for row in rows], np.int64)
        advantages = np.array([row.advantage for row in rows], np.float32)[:, None] * mask.astype(np.float32)
        tensors: dict[str, Array] = {
            "prompts": left,
            "responses": right,
            "response_mask": mask,
            "input_ids": np.concatenate([left, right], axis=1),
            "attention_mask": attention,
            "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
            "rollout_log_probs": pad_right(
                [filled_logprobs(row.tokens)[row.prompt_length :] for row in rows], np.float32
            ),
            "rm_scores": pad_right([_scores(row) for row in rows], np.float32),
            "advantages": advantages,
            "returns": advantages.copy(),
        }
        return to_safetensors(tensors, rows, "verl")


def _scores(row: Row) -> Array:
    scores = np.zeros(len(row) - row.prompt_length, np.float32)
    scores[-1] = row.reward
    return scores
