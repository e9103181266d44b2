"""AReaL: the dictionary of padded tensors that a rollout workflow returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hpcroll.config import Strict
from hpcroll.exporters.base import Fact
from hpcroll.exporters.row_exporter import LOST_IN_ROWS, RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, filled_logprobs, token_versions
from hpcroll.exporters.tensors import pad_right, to_safetensors


class ArealOptions(TrainingOptions):
    """Options of the format `areal`. AReaL makes its own advantages from `rewards`."""


class Areal(RowExporter):
    """`part-<number>.safetensors`: B rows of at most T tokens, padded with 0 at their ends.

    `input_ids`, `loss_mask` and `versions` (-1 for context and padding) int32 (B, T), `logprobs` float32 (B,
    T), 0.0 where nothing was sampled, `attention_mask` bool (B, T), `rewards` float32 (B,). Entry i is of
    token i; AReaL rolls by one itself.
    """

    Options: ClassVar[type[Strict]] = ArealOptions
    loses: ClassVar[tuple[Fact, ...]] = LOST_IN_ROWS
    source: ClassVar[str] = (
        "areal 1.0.4 (inclusionAI/AReaL 4aef98d): areal/workflow/rlvr.py, "
        "areal/experimental/openai/types.py, areal/utils/data.py"
    )
    name_format: ClassVar[str] = "part-{number:05d}.safetensors"
    packages: ClassVar[tuple[str, ...]] = ("safetensors.numpy",)

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        tensors = {
            "input_ids": pad_right([row.tokens.ids for row in rows], np.int32),
            "loss_mask": pad_right([row.tokens.loss_mask for row in rows], np.int32),
            "logprobs": pad_right([filled_logprobs(row.tokens) for row in rows], np.float32),
            "versions": pad_right([token_versions(row.segment) for row in rows], np.int32, -1),
            "attention_mask": pad_right([np.ones(len(row), bool) for row in rows], bool),
            "rewards": np.array([row.reward for row in rows], np.float32),
        }
        return to_safetensors(tensors, rows, "areal")
