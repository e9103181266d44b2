"""slime: `Sample`s in the files that its trainer loads in place of a rollout."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from io import BytesIO
from typing import Any, ClassVar

from hpcroll.config import Strict
from hpcroll.contract import Status
from hpcroll.exporters.base import Fact
from hpcroll.exporters.row_exporter import LOST_IN_ROWS, RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, filled_logprobs, stable_number
from hpcroll.exporters.tensors import describe_row

_ARCHIVE = "archive"


class SlimeOptions(TrainingOptions):
    """Options of the format `slime`. slime makes its own advantages; `metadata` has the group's."""


class Slime(RowExporter):
    """`rollout_<number>.pt`, for `--load-debug-rollout-data OUT/rollout_{rollout_id}.pt`: `rollout_id` and
    `samples`, one `Sample.to_dict()` per row.

    `tokens` (T,) are all tokens; `loss_mask` and `rollout_log_probs` (0.0 where nothing was sampled) are of
    the response alone, which begins with the first sampled token, entry i of its token i. `group_index`,
    `index` and `rollout_id` are numbers that stand for the group, the row and the rollout; rows of a rollout
    share the last, so that slime counts them as one. `metadata` names them, with weight and advantage.
    """

    Options: ClassVar[type[Strict]] = SlimeOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        *LOST_IN_ROWS,
        Fact.SAMPLED,
        Fact.VERSIONS,
    )
    source: ClassVar[str] = (
        "THUDM/slime 624b824 (2026-08-21): slime/utils/types.py (Sample), "
        "slime/observability/rollout_data_utils.py (load_debug_rollout_data), slime/ray/rollout.py"
    )
    name_format: ClassVar[str] = "rollout_{number}.pt"

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        samples = [_sample(row) for row in rows]
        return torch_file({"rollout_id": number, "samples": samples})


def torch_file(value: Any) -> bytes:
    """`value`, made of plain containers, numbers and texts, as `torch.save` would write it, without torch."""
    sink = BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", pickle.dumps(value, protocol=2)), ("version", b"3\n")):
            # A fixed date: a part's bytes must not vary.
            archive.writestr(zipfile.ZipInfo(f"{_ARCHIVE}/{name}"), data)
    return sink.getvalue()


def _sample(row: Row) -> dict[str, Any]:
    rollout_id, start = row.rollout.rollout_id, row.prompt_length
    status = row.rollout.status
    return {
        "group_index": stable_number(row.rollout.group_id),
        "index": stable_number(f"{rollout_id}.{row.segment_index}"),
        "rollout_id": stable_number(rollout_id),
        "prompt": "",
        "tokens": row.tokens.ids.tolist(),
        "response": "",
        "response_length": len(row) - start,
        "label": None,
        "reward": row.reward,
        "loss_mask": row.tokens.loss_mask[start:].tolist(),
        "weight_versions": [str(run.version_low) for run in row.segment.policy_runs],
        "rollout_log_probs": filled_logprobs(row.tokens)[start:].tolist(),
        "remove_sample": False,
        "status": "aborted" if status is Status.CANCELLED else status.value,
        "metadata": describe_row(row),
        "spec_info": {},
        "prefix_cache_info": {},
    }
