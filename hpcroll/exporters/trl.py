"""TRL: the samples of its asynchronous GRPO trainer, as a table that `datasets` opens."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, ClassVar

from hpcroll.config import Strict
from hpcroll.exporters.base import Fact
from hpcroll.exporters.packages import need
from hpcroll.exporters.row_exporter import LOST_IN_ROWS, RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, filled_logprobs, stable_number
from hpcroll.exporters.tensors import describe_row


class TrlOptions(TrainingOptions):
    """Options of the format `trl`."""


class Trl(RowExporter):
    """`part-<number>.parquet`: one `RolloutSample` a row.

    `input_ids` and `completion_mask` int64, `old_log_probs` float32 (0.0 where nothing was sampled), each
    (T,), entry i of token i: the trainer scores token i off its predecessor. `advantage` is the rollout's,
    on each of its rows. `group_id` is a number that stands for the group, `model_version` the oldest version
    that sampled a token of the row, `metrics.reward` the reward. Further columns, which TRL ignores:
    `rollout_id`, `group`, `segment_index`, `sample_index`, `task_id`, `status`, `weight`, `policy_name`,
    `lineage`.
    """

    Options: ClassVar[type[Strict]] = TrlOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        *LOST_IN_ROWS,
        Fact.SAMPLED,
        Fact.VERSIONS,
    )
    source: ClassVar[str] = (
        "trl 1.16.0: trl/experimental/async_grpo/async_rollout_worker.py (RolloutSample), "
        "async_grpo_trainer.py (RolloutQueueDataset, DataCollatorForRollout), packing.py"
    )
    name_format: ClassVar[str] = "part-{number:05d}.parquet"
    packages: ClassVar[tuple[str, ...]] = ("pyarrow.parquet",)

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        arrow = need("pyarrow", "trl")
        table = arrow.Table.from_pylist([_sample(row) for row in rows], schema=_schema(arrow))
        sink = BytesIO()
        need("pyarrow.parquet", "trl").write_table(table, sink, compression="zstd", row_group_size=64)
        return sink.getvalue()


def _schema(pa: Any) -> Any:
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int64())),
            ("completion_mask", pa.list_(pa.int64())),
            ("old_log_probs", pa.list_(pa.float32())),
            ("advantage", pa.float64()),
            ("model_version", pa.int64()),
            ("group_id", pa.int64()),
            ("metrics", pa.struct([("reward", pa.float64())])),
            ("rollout_id", pa.string()),
            ("segment_index", pa.int32()),
            ("group", pa.string()),
            ("sample_index", pa.int32()),
            ("task_id", pa.string()),
            ("status", pa.string()),
            ("weight", pa.float64()),
            ("policy_name", pa.string()),
            ("lineage", pa.string()),
        ]
    )


def _sample(row: Row) -> dict[str, Any]:
    said = describe_row(row)
    return {
        **{key: _utf8(value) for key, value in said.items() if key not in ("reward", "group_id")},
        "input_ids": row.tokens.ids,
        "completion_mask": row.tokens.loss_mask,
        "old_log_probs": filled_logprobs(row.tokens),
        "model_version": row.rollout.summary.version_low[row.segment_index],
        "group_id": stable_number(row.rollout.group_id),
        "metrics": {"reward": row.reward},
        "group": _utf8(row.rollout.group_id),
    }


def _utf8(value: Any) -> Any:
    """Text with what no UTF-8 can hold written as an escape."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
