"""SkyRL: `GeneratorOutput`, the lists that a generator hands to the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hpcroll.config import Strict
from hpcroll.exporters.base import Fact
from hpcroll.exporters.json_text import json_text
from hpcroll.exporters.row_exporter import LOST_IN_ROWS, RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, filled_logprobs


class SkyRlOptions(TrainingOptions):
    """Options of the format `skyrl`. SkyRL makes its own advantages from `rewards`."""


class SkyRl(RowExporter):
    """`part-<number>.json`: one `GeneratorOutput`; every list has one entry per row.

    A response begins with the first sampled token; `loss_masks` and `rollout_logprobs` (0.0 where nothing
    was sampled) are of its length, entry i of token i. The rows of a rollout stand together, as SkyRL's
    step-wise training wants them: `is_last_step` ends a rollout. `trajectory_ids` has the group as
    `instance_id` and the sample's index as `repetition_id`. `weights` is hpcroll's own: each row's share of
    its rollout.
    """

    Options: ClassVar[type[Strict]] = SkyRlOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        *LOST_IN_ROWS,
        Fact.SAMPLED,
        Fact.VERSIONS,
        Fact.LINEAGE,
        Fact.STATUS,
        Fact.TASK,
    )
    source: ClassVar[str] = (
        "skyrl 0.3.0 (NovaSky-AI/SkyRL): skyrl/train/generators/base.py, skyrl/train/utils/trainer_utils.py "
        "(validate_generator_output), skyrl/train/dataset/preprocess.py"
    )
    name_format: ClassVar[str] = "part-{number:05d}.json"

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        output: dict[str, Any] = {
            "prompt_token_ids": [row.tokens.ids[: row.prompt_length].tolist() for row in rows],
            "response_ids": [row.tokens.ids[row.prompt_length :].tolist() for row in rows],
            "rewards": [row.reward for row in rows],
            "loss_masks": [row.tokens.loss_mask[row.prompt_length :].tolist() for row in rows],
            "stop_reasons": ["length" if row.segment.ended == "length" else "stop" for row in rows],
            "rollout_metrics": None,
            "rollout_logprobs": [filled_logprobs(row.tokens)[row.prompt_length :].tolist() for row in rows],
            "trajectory_ids": [
                {
                    "instance_id": row.rollout.group_id,
                    "repetition_id": row.rollout.summary.sample_index,
                }
                for row in rows
            ],
            "trajectory_generation_times": None,
            "rollout_expert_indices": None,
            "is_last_step": [row.is_last for row in rows],
            "env_metrics": None,
            "pixel_values": None,
            "image_grid_thw": None,
            "weights": [row.weight for row in rows],
        }
        return json_text(output).encode()
