"""A trainer's side of a run: follow the shards, form group advantages, publish a version per step.

    python docs/examples/trainer_loop.py runs/swe1 --steps 100

Needs the core of hpcroll alone (numpy, pydantic, zstandard). Where the optimiser would step, it prints
what it would step on. Its state survives a kill: run it again and it goes on with the next batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from hpcroll.fs import RunPaths
from hpcroll.policy import PolicyRegistry
from hpcroll.shards import Batch, open_run


def advantages(batch: Batch) -> np.ndarray:
    """float32 (S,): each segment's reward less its group's mean within the batch (GRPO without scaling)."""
    result = np.zeros(len(batch), dtype=np.float32)
    for group in np.unique(batch.group_id):
        members = batch.group_id == group
        result[members] = batch.reward[members] - batch.reward[members].mean()
    return result


def objective(batch: Batch) -> float:
    """The policy-gradient surrogate at the sampling policy, averaged over the trained tokens."""
    segment_of_token = np.repeat(np.arange(len(batch)), np.diff(batch.cu_seqlens))
    trained = batch.loss_mask == 1
    weight = advantages(batch)[segment_of_token] * batch.rollout_weight[segment_of_token]
    return float((weight * np.where(trained, batch.logprobs, 0.0))[trained].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=65_536, help="tokens in one batch")
    parser.add_argument("--state", type=Path, help="reader's position; RUN_DIR.trainer.json where absent")
    options = parser.parse_args()
    state_file = options.state or options.run_dir.with_suffix(".trainer.json")
    policy = PolicyRegistry(RunPaths(options.run_dir))
    reader = open_run(options.run_dir).follow(trainer="example")
    if state_file.exists():
        reader.load_state_dict(json.loads(state_file.read_text()))
    latest = policy.latest()
    version = 0 if latest is None else latest.version
    for step, batch in enumerate(reader.packed(options.max_tokens), start=1):
        print(
            f"step {step}: {len(batch)} segments, {int(batch.loss_mask.sum())} trained tokens, "
            f"mean reward {batch.reward.mean():.3f}, objective {objective(batch):+.4f}, "
            f"versions {batch.version_low.min()} to {batch.version_high.max()}",
            flush=True,
        )
        version += 1
        policy.publish(version, weights=None)
        state_file.write_text(json.dumps(reader.state_dict()))
        if step == options.steps:
            break


if __name__ == "__main__":
    main()
