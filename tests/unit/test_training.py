"""The torch adapter with the real torch: every token once over ranks and workers, and exact resumes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hpcroll.errors import ConfigError
from hpcroll.shards import open_run
from tests.capabilities import need
from tests.shard_runs import ShardRun, trajectory

MAX_TOKENS = 2500
GROUPS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ShardRun:
    need("torch")
    made = ShardRun.create(tmp_path_factory.mktemp("training") / "run")
    with made.writer("w0") as writer:
        made.commit(writer, "w0", range(4 * GROUPS), trainable=True, not_trainable_because=())
    made.end("w0")
    return made


def dataset(run: ShardRun, **options: Any) -> Any:
    from hpcroll.training import TrajectoryDataset

    return TrajectoryDataset(run.paths.root, max_tokens=MAX_TOKENS, **options)


def rows(items: Any) -> Counter[tuple[str, int]]:
    """Rollout and length of every segment."""
    found: Counter[tuple[str, int]] = Counter()
    for item in items:
        lengths = item["cu_seqlens"].diff().tolist()
        found.update(zip(item["rollout_id"], lengths, strict=True))
    return found


def whole(run: ShardRun) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for n in range(4 * GROUPS):
        made = trajectory(n)
        found.update((made.record.rollout_id, len(t)) for t in made.tokens if t.loss_mask.any())
    return found


def test_tensors_say_what_the_batch_says(run: ShardRun) -> None:
    import torch

    from hpcroll.training import padded_tensors, tensors

    for batch in open_run(run.paths.root).packed(MAX_TOKENS):
        flat = tensors(batch)
        assert flat["ids"].dtype == torch.int64
        assert flat["loss_mask"].dtype == torch.bool
        np.testing.assert_array_equal(flat["ids"].numpy(), batch.ids)
        np.testing.assert_array_equal(flat["logprobs"].numpy(), batch.logprobs)
        assert flat["rollout_id"] == batch.rollout_id.tolist()
        assert int(flat["cu_seqlens"][-1]) == len(flat["ids"]) == len(flat["position_ids"])
        for side in ("left", "right"):
            padded = padded_tensors(batch, side=side, pad_id=7)  # type: ignore[arg-type]
            real = padded["attention_mask"].bool()
            assert padded["ids"].shape == (len(batch), batch.max_seqlen)
            assert torch.equal(padded["ids"][real], flat["ids"])
            assert torch.equal(padded["position_ids"][real], flat["position_ids"])
            assert bool((padded["ids"][~real] == 7).all())
            assert not padded["loss_mask"][~real].any()


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_read_every_row_once(run: ShardRun, workers: int) -> None:
    found: Counter[tuple[str, int]] = Counter()
    for rank in range(2):
        part = dataset(run, rank=rank, world=2)
        once = rows(part.loader(num_workers=workers))
        assert once == rows(part.loader(num_workers=workers)), "a second pass starts anew"
        found += once
    assert found == whole(run)


def test_plain_data_loader_splits_over_its_workers(run: ShardRun) -> None:
    from torch.utils.data import DataLoader

    assert rows(DataLoader(dataset(run), batch_size=None, num_workers=2)) == whole(run)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"shuffle": 3, "window": 3}])
def test_state_counts_what_was_yielded_and_resumes_exactly(
    run: ShardRun, workers: int, options: dict[str, Any]
) -> None:
    for taken in (0, 1, 3):
        first = dataset(run, **options)
        stream = first.loader(num_workers=workers)
        head = rows(next(stream) for _ in range(taken))
        state = json.loads(json.dumps(first.state_dict()))
        stream.close()
        resumed = dataset(run, **options)
        resumed.load_state_dict(state)
        assert json.loads(json.dumps(resumed.state_dict())) == state
        assert head + rows(resumed.loader(num_workers=workers)) == whole(run)


def test_state_of_other_workers_is_refused(run: ShardRun) -> None:
    first = dataset(run)
    next(iter(first))
    resumed = dataset(run)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="of 1 loader workers, not 2"):
        next(resumed.loader(num_workers=2))


def test_padding_is_a_choice_of_the_dataset(run: ShardRun) -> None:
    for item in dataset(run, padding="left", pad_id=1):
        assert item["ids"].shape == item["attention_mask"].shape
        assert bool(item["attention_mask"][:, -1].all()), "padding is on the left"
