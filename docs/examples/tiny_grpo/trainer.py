"""The trainer: follows the shards, takes one GRPO step per plan, publishes each version.

    python -m tiny_grpo.trainer ROOT

It may be killed at any moment and started again. Model, optimiser and the reader's position are one file that
is replaced as a whole after each step: what is redone after a kill is the step that was under way, from the
very plan that it had before, so that no group is lost and none is trained on twice.
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcroll import Run, open_run
from hpcroll.fs import replace
from hpcroll.shards import Batch, Step
from tiny_grpo.layout import TRAINER, Layout, Settings
from tiny_grpo.model import Policy, load_policy, save_weights, token_logprobs

_EPSILON = 1e-4
"""Added to a group's standard deviation: groups without any have no advantages anyway."""


class Trainer:
    """The policy that learns, with its optimiser; `control` gives each rollout the reward of another one."""

    def __init__(self, layout: Layout, settings: Settings, *, control: bool) -> None:
        self._layout, self._settings, self._control = layout, settings, control
        self._policy = load_policy(layout.weights(0))
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), settings.learning_rate, weight_decay=0.0
        )
        self._run = Run.open(layout.run)

    def train(self) -> None:
        """Takes the steps that are still to be taken."""
        settings = self._settings
        reader = open_run(self._layout.run).follow(trainer=TRAINER, max_lag=settings.max_lag)
        number = 0
        if self._layout.checkpoint.exists():
            saved = torch.load(self._layout.checkpoint, weights_only=True)
            self._policy.load_state_dict(saved["policy"])
            self._optimizer.load_state_dict(saved["optimizer"])
            reader.load_state_dict(json.loads(saved["reader"]))
            number = saved["step"]
            self._publish(number, settled=saved["settled"])  # a kill may have come between saving and this
        if number >= settings.steps:
            return
        for step in reader.steps(groups=settings.groups_per_step, max_tokens=settings.max_tokens):
            said = self._take(step)
            replace(self._layout.step(step.number), json.dumps(said).encode())
            self._save(step, reader.state_dict())
            self._publish(step.number, settled=step.settled_groups)
            if step.number == settings.steps:
                return

    def _take(self, step: Step) -> dict[str, Any]:
        """Some passes over the step's micro-batches, each an update; what is to be said of it."""
        settings = self._settings
        batches = [batch for batch in step.batches if len(batch)]
        rewards = rewards_of(batches, shuffled_by=step.number if self._control else None)
        parts = [prepare(self._policy, batch, rewards, max_ratio=settings.max_ratio) for batch in batches]
        for _ in range(settings.passes):
            for part in parts:
                self._optimizer.zero_grad()
                grpo_loss(self._policy, part, clip=settings.clip).backward()
                torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
                self._optimizer.step()
        # What learns here is the version before: the lag is how many versions older the sampler was.
        lags = step.number - 1 - np.concatenate([batch.version_low for batch in batches])
        return {
            "step": step.number,
            "groups": [group.group_id for group in step.groups],
            "zero_variance": sum(group.reward_std == 0 for group in step.groups),
            "counts": asdict(step.counts),
            "rollouts": step.rollouts,
            "tokens": step.trained_tokens,
            "reward": float(np.mean([group.reward_mean for group in step.groups])),
            "lag": [int(lags.min()), float(lags.mean()), int(lags.max())],
            "max_ratio": max(part.max_ratio for part in parts),
        }

    def _save(self, step: Step, reader: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        state = {
            "step": step.number,
            "settled": step.settled_groups,
            "policy": self._policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "reader": json.dumps(reader),
        }
        torch.save(state, buffer)
        replace(self._layout.checkpoint, buffer.getvalue())

    def _publish(self, version: int, *, settled: int) -> None:
        """Announces the weights of `version`, then lets workers go on to further groups."""
        path = self._layout.weights(version)
        digest = save_weights(self._policy, path)
        self._run.policy.publish(version, weights=str(path), digest=digest)
        # What no step trained on takes no place in a version.
        dropped = max(0, settled - version * self._settings.groups_per_step)
        self._run.policy.settle(settled, dropped=dropped)


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch of S segments of at most T tokens, with what its updates leave as it is."""

    ids: Tensor
    """int64 (S, T)."""
    trained: Tensor
    """bool (S, T)."""
    before: Tensor
    """float32 (S, T): the log-probabilities of the policy as it came into this step."""
    weight: Tensor
    """float32 (S, T): advantage and share of the segment, times the truncated importance weight."""
    max_ratio: float
    """The highest importance ratio, before it was cut off."""


@torch.no_grad()
def prepare(policy: Policy, batch: Batch, rewards: dict[str, float], *, max_ratio: float) -> Part:
    """`batch` made ready for the updates of one step.

    The advantage of a rollout is its reward less its group's mean, in the group's standard deviations (GRPO).
    Tokens were sampled by older versions; each is weighed by how much likelier it has become since, cut off
    at `max_ratio` (truncated importance sampling).
    """
    rows = batch.padded()
    ids, trained = torch.from_numpy(rows.ids.astype(np.int64)), torch.from_numpy(rows.loss_mask) == 1
    before = token_logprobs(policy, ids)
    ratio = torch.where(trained, before - torch.from_numpy(rows.logprobs), 0.0).exp()
    reward = np.array([rewards[rollout_id] for rollout_id in batch.rollout_id], np.float32)
    advantage = (reward - batch.group_reward_mean) / (batch.group_reward_std + _EPSILON)
    weight = torch.from_numpy(advantage * batch.rollout_weight)[:, None] * ratio.clamp(max=max_ratio)
    return Part(ids, trained, before, weight, float(ratio.max()))


def grpo_loss(policy: Policy, part: Part, *, clip: float) -> Tensor:
    """The clipped surrogate, averaged over the trained tokens.

    A token's probability stops to count once it is further than a factor of 1 + `clip` from what it was when
    the step began, in the direction in which its advantage pulls (PPO).
    """
    change = torch.where(part.trained, token_logprobs(policy, part.ids) - part.before, 0.0).exp()
    bounded = change.clamp(1 / (1 + clip), 1 + clip)
    surrogate = torch.minimum(change * part.weight, bounded * part.weight)
    return -torch.where(part.trained, surrogate, 0.0).sum() / part.trained.sum()


def rewards_of(batches: list[Batch], *, shuffled_by: int | None) -> dict[str, float]:
    """The reward of each rollout; shuffled within its group, by that seed, where one is given.

    Shuffling leaves a group's mean and deviation as they are and takes away what they could teach.
    """
    rewards = {
        str(rollout_id): float(reward)
        for batch in batches
        for rollout_id, reward in zip(batch.rollout_id, batch.reward, strict=True)
    }
    if shuffled_by is None:
        return rewards
    groups: dict[str, set[str]] = {}
    for batch in batches:
        for group_id, rollout_id in zip(batch.group_id, batch.rollout_id, strict=True):
            groups.setdefault(str(group_id), set()).add(str(rollout_id))
    random = np.random.default_rng(shuffled_by)
    for group in groups.values():
        members = sorted(group)
        shuffled = random.permutation([rewards[rollout_id] for rollout_id in members])
        rewards.update(zip(members, shuffled.tolist(), strict=True))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="shuffle the rewards within each group")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    settings = Settings(steps=options.steps)
    Trainer(Layout(options.root), settings, control=options.control).train()


if __name__ == "__main__":
    main()
