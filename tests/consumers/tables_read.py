"""polars, DuckDB and datasets read a Parquet export: `tables_read.py OUT`, one JSON line per library."""

from __future__ import annotations

import json
import sys

import datasets
import duckdb
import polars

pattern = f"{sys.argv[1]}/part-*.parquet"
with_segment = polars.col("trainable") & polars.col("segment_index").is_not_null()
frame = polars.read_parquet(pattern).filter(with_segment)
found = {
    "polars": [frame.height, int(frame["ids"].list.sum().sum()), int(frame["loss_mask"].list.sum().sum())],
    "duckdb": duckdb.sql(
        "select count(*), sum(list_sum(ids)), sum(list_sum(loss_mask)) "
        f"from '{pattern}' where trainable and segment_index is not null"
    ).fetchall()[0],
}
rows = datasets.load_dataset("parquet", data_files=pattern, split="train", cache_dir=f"{sys.argv[1]}/.cache")
rows = [row for row in rows if row["trainable"] and row["segment_index"] is not None]
found["datasets"] = [
    len(rows),
    sum(sum(row["ids"]) for row in rows),
    sum(sum(row["loss_mask"]) for row in rows),
]
print(json.dumps({name: [int(value) for value in values] for name, values in found.items()}))
