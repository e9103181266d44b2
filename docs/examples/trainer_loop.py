"""A trainer's side of a run: follow the shards, form group advantages, publish a version per step.

    python docs/examples/trainer_loop.py runs/swe1 --steps 100

Needs the core of hpcroll alone (numpy, pydantic, zstandard). Where the optimiser would step, it prints
what it would step on. Its state survives a kill: run it again and it goes on with the next step. With
torch, `hpcroll.training.tensors(batch)` gives the same arrays as tensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from hpcroll.fs import RunPaths
from hpcroll.fs.atomic import replace
from hpcroll.policy import PolicyRegistry
from hpcroll.shards import Batch, Step, open_run


def advantages(batch: Batch) -> np.ndarray:
    """float32 (S,): each segment's reward less its group's mean, over all ranks (GRPO without scaling)."""
    return batch.reward - batch.group_reward_mean


def objective(batch: Batch) -> float:
    """The policy-gradient surrogate at the sampling policy, summed over the trained tokens."""
    trained = batch.loss_mask == 1
    weight = (advantages(batch) * batch.rollout_weight)[batch.segment_of_token]
    return float((weight * np.where(trained, batch.logprobs, 0.0))[trained].sum())


def told(step: Step) -> str:
    """A line on a step."""
    reward = np.mean([group.reward_mean for group in step.groups])
    total = sum(objective(batch) for batch in step.batches)
    return (
        f"step {step.number}: {len(step.groups)} groups in {len(step.batches)} micro-batches, "
        f"{step.trained_tokens} trained tokens, mean reward {reward:.3f}, "
        f"objective {total / max(step.trained_tokens, 1):+.4f}, "
        f"versions {step.versions.low} to {step.versions.high}, {step.settled_groups} groups settled"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=2, help="groups in one step")
    parser.add_argument("--max-tokens", type=int, default=65_536, help="tokens in one micro-batch")
    parser.add_argument("--state", type=Path, help="reader's position; RUN_DIR.trainer.json where absent")
    options = parser.parse_args()
    state_file = options.state or options.run_dir.with_suffix(".trainer.json")
    policy = PolicyRegistry(RunPaths(options.run_dir))
    reader = open_run(options.run_dir).follow(trainer="example")
    if state_file.exists():
        reader.load_state_dict(json.loads(state_file.read_text()))
    for step in reader.steps(groups=options.groups, max_tokens=options.max_tokens):
        print(told(step), flush=True)
        # Published first: a kill before the state is saved repeats the step, and the same publication.
        policy.publish(step.number, weights=None)
        replace(state_file, json.dumps(reader.state_dict()).encode())
        if step.number == options.steps:
            break


if __name__ == "__main__":
    main()
