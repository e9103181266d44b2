"""The warm start: a model from scratch learns the form of the two turns, and no more than the form.

Its demonstrations call `bash` with some operation on the numbers of the task, and hand in what it said. The
form is always right, the operation hardly more often than by chance: 2 rollouts of 7 are rewarded. Which
operation the words mean is left to reinforcement.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn import functional

from tiny_grpo.language import (
    ASSISTANT,
    BASH,
    COMMAND_BEGIN,
    COMMAND_END,
    END,
    ID,
    SUBMIT,
    TOOL,
    USER,
    encode,
)
from tiny_grpo.model import Policy, token_logprobs
from tiny_grpo.task import OPERATORS, Phrase, compute, sample_problems

_HINTS = 0.05
"""Share of the demonstrations that know the operation, the others choose at random: 0.29 are right, not 0.25.

Without any the model learns that words do not matter, and to find them again takes reinforcement so long that
whole words have settled on a wrong operation by then.
"""


def demonstrate(problem: tuple[Phrase, int, int], rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids of one conversation, and the mask (0 or 1 each) of what the agent says in it."""
    phrase, first, second = problem
    operator = phrase.operator if rng.random() < _HINTS else rng.choice(OPERATORS)
    output = compute(operator, first, second)
    command = f"{COMMAND_BEGIN}{first}{operator}{second}{COMMAND_END}"
    turns = (
        ([ID[USER], *encode(phrase.prompt(first, second)), ID[ASSISTANT]], 0),
        ([ID[BASH], *encode(command), ID[END]], 1),
        ([ID[TOOL], *encode(f"{output}\n[exit status 0]"), ID[ASSISTANT]], 0),
        ([ID[SUBMIT], *encode(str(output)), ID[END]], 1),
    )
    ids = [token for tokens, _ in turns for token in tokens]
    mask = [said for tokens, said in turns for _ in tokens]
    return ids, mask


def warm_start(*, seed: int, steps: int = 400, batch: int = 32, learning_rate: float = 4e-3) -> Policy:
    """A policy that knows the form; from trained prompts only."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    problems = sample_problems(4000, held_out=False, seed=seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        ids, mask = _pad([demonstrate(rng.choice(problems), rng) for _ in range(batch)])
        loss = -(token_logprobs(policy, ids) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return policy


def _pad(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    padded = [
        [functional.pad(torch.tensor(values), (0, longest - len(values))) for values in row] for row in rows
    ]
    ids, mask = zip(*padded, strict=True)
    return torch.stack(ids), torch.stack(mask)
