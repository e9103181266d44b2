"""A stand-in for prime-rl's trainer, from its documented protocol; needs msgspec and nothing of hpcroll.

It broadcasts the version that it starts from, waits for `rollouts/step_<N>/rank_<R>.bin` of each rank,
decodes them strictly, writes down what it was given, and broadcasts version N: `broadcasts/step_<N>/STABLE`
last of all. Like the real one it removes the broadcast of two steps before.

    python prime_rl_trainer.py OUT WORLD FIRST_STEP LOG
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import msgspec


class EncodedTensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


class RoutedExperts(msgspec.Struct, array_like=True):
    data: bytes
    shape: list[int]
    dtype: str


class MicroBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Fields, order and types of prime-rl's `transports/rollouts/types.py` at 559b447."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    mm_kwargs: dict[str, EncodedTensor] | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


_DECODER = msgspec.msgpack.Decoder(list[MicroBatch])


def decode(data: bytes) -> list[MicroBatch]:
    """A rank file; raises where it is not what prime-rl would take."""
    batches = _DECODER.decode(data)
    for batch in batches:
        per_token = (
            batch.loss_mask,
            batch.advantages,
            batch.inference_logprobs,
            batch.position_ids,
            batch.temperatures,
            batch.env_names,
            batch.rl_weights,
        )
        for values in per_token:
            assert values is None or len(values) == len(batch.input_ids)
        assert sum(batch.sequence_lengths) == sum(batch.seq_lens) == len(batch.input_ids)
        assert "all" not in batch.env_names
    return batches


def broadcast(out: Path, version: int) -> None:
    folder = out / "broadcasts" / f"step_{version}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "STABLE").touch()
    shutil.rmtree(out / "broadcasts" / f"step_{version - 2}", ignore_errors=True)


def train(out: Path, world: int, first_step: int, log: Path) -> None:
    """Until `OUT/stop` exists; each line of `log` is one step: the trained sequences of all ranks."""
    step = first_step
    broadcast(out, step - 1)
    while True:
        paths = [out / "rollouts" / f"step_{step}" / f"rank_{rank}.bin" for rank in range(world)]
        while not all(path.exists() for path in paths):
            if (out / "stop").exists():
                return
            time.sleep(0.01)
        ranks = [decode(path.read_bytes()) for path in paths]
        assert len({len(batches) for batches in ranks}) == 1, "ranks have different numbers of micro-batches"
        sequences = []
        for batch in (batch for batches in ranks for batch in batches):
            start = 0
            for length in batch.sequence_lengths:
                span = slice(start, start + length)
                start += length
                if any(batch.loss_mask[span]):
                    sequences.append([batch.input_ids[span], batch.loss_mask[span]])
        with log.open("a") as file:
            file.write(json.dumps({"step": step, "sequences": sequences}) + "\n")
        broadcast(out, step)
        step += 1


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
