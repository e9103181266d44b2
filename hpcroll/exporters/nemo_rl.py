"""NeMo-RL: the training batch of its policy-gradient losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from hpcroll.config import Strict
from hpcroll.exporters.base import Fact
from hpcroll.exporters.row_exporter import LOST_IN_ROWS, RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, filled_logprobs
from hpcroll.exporters.tensors import pad_right, to_safetensors


class NemoRlOptions(TrainingOptions):
    """Options of the format `nemo-rl`."""

    pad_token_id: int = Field(default=0, ge=0)
    """Id that `input_ids` is padded with."""


class NemoRl(RowExporter):
    """`part-<number>.safetensors`: B rows of at most T tokens, padded at their ends.

    `input_ids` and `token_mask` int64 (B, T), `generation_logprobs` float32 (B, T), 0.0 where nothing was
    sampled, `advantages` float32 (B, T), the rollout's at each of its tokens, `input_lengths` int64 (B,),
    `sample_mask` float32 (B,), the rollout's weight, `total_reward` float32 (B,). Entry i is of token i; the
    losses drop entry 0. `prev_logprobs` and `reference_policy_logprobs` are the trainer's to compute.
    """

    Options: ClassVar[type[Strict]] = NemoRlOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        *LOST_IN_ROWS,
        Fact.SAMPLED,
        Fact.VERSIONS,
    )
    source: ClassVar[str] = (
        "NVIDIA-NeMo/RL 7ea279a (2026-08-22): nemo_rl/algorithms/loss/loss_functions.py "
        "(ClippedPGLossDataDict), nemo_rl/experience/payload.py, nemo_rl/data_plane/schema.py"
    )
    name_format: ClassVar[str] = "part-{number:05d}.safetensors"
    packages: ClassVar[tuple[str, ...]] = ("safetensors.numpy",)

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        tensors = {
            "input_ids": pad_right(
                [row.tokens.ids for row in rows], np.int64, fill=self.options.pad_token_id
            ),
            "input_lengths": np.array([len(row) for row in rows], np.int64),
            "token_mask": pad_right([row.tokens.loss_mask for row in rows], np.int64),
            "sample_mask": np.array([row.rollout.summary.rollout_weight for row in rows], np.float32),
            "generation_logprobs": pad_right([filled_logprobs(row.tokens) for row in rows], np.float32),
            "advantages": pad_right([np.full(len(row), row.advantage) for row in rows], np.float32),
            "total_reward": np.array([row.reward for row in rows], np.float32),
        }
        return to_safetensors(tensors, rows, "nemo-rl")
