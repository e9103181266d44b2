"""The example of a loop that learns: its parts, and the whole of it with its parts killed on the way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcroll.fs import RunPaths
from hpcroll.policy import PolicyRegistry
from tests.capabilities import need

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LAST_LINE = re.compile(
    r"reward_first_fifth=(-?\d\.\d+) reward_last_fifth=(-?\d\.\d+) reward_gain=(-?\d\.\d+)"
)
ROW = re.compile(
    r" *(?P<step>\d+) +(?P<version>\d+) +(?P<low>\d+)/(?P<mean>[\d.]+)/(?P<high>\d+) +(?P<submitted>\d+) "
    r"+(?P<trained>\d+) +(?P<even>\d+) +(?P<stale>\d+) +(?P<short>\d+) +(?P<open>\d+) +(?P<reward>[\d.]+) "
    r"+(?P<held_out>[\d.]+) +(?P<tokens>\d+) +(?P<max_ratio>[\d.]+)"
)
GROUPS_PER_STEP = 12


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the example importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("example")
def test_what_is_sampled_reads_and_encodes_back_to_the_same_ids() -> None:
    from tiny_grpo.language import ASSISTANT, END, ID, PIECES, encode, read_reply, render_prompt

    assert not any(other != piece and other.startswith(piece) for piece in PIECES for other in PIECES)
    ids = [
        ID[piece] for piece in ("add", " ", "<bash>", "echo $((", "1", "+", "2", "))", "<submit>", "3", END)
    ]
    reply = read_reply(ids, call_id="call")
    assert [json.loads(call["function"]["arguments"]) for call in reply["tool_calls"]] == [
        {"command": "echo $((1+2))"},
        {"answer": "3"},
    ]
    user = {"role": "user", "content": "add 1 and 2"}
    assert (
        render_prompt([user, reply])[: len(render_prompt([user])) + len(ids)] == render_prompt([user]) + ids
    )
    assert encode("bash: no\n[exit status 1]").count(ID["<unknown>"]) > 0
    assert render_prompt([user])[-1] == ID[ASSISTANT]


@pytest.mark.usefixtures("example")
def test_no_held_out_prompt_is_ever_trained_on() -> None:
    from tiny_grpo.task import make_tasks

    trained = {task.prompt for seed in range(3) for task in make_tasks(400, held_out=False, seed=seed)}
    held_out = {task.prompt for seed in range(40) for task in make_tasks(24, held_out=True, seed=seed)}
    assert len(held_out) > 300
    assert not trained & held_out


@pytest.mark.usefixtures("example")
def test_the_warm_start_shows_the_right_operation_hardly_more_often_than_chance() -> None:
    need("torch")
    import random

    from tiny_grpo.language import decode
    from tiny_grpo.task import sample_problems
    from tiny_grpo.warm_start import demonstrate

    rng = random.Random(1)
    problems = sample_problems(4000, held_out=False, seed=1)
    shown = [decode(demonstrate(problem, rng)[0]) for problem in problems]
    right = [
        f"(({first}{phrase.operator}{second}))" in text
        for text, (phrase, first, second) in zip(shown, problems, strict=True)
    ]
    assert 0.25 < sum(right) / len(right) < 0.33


@pytest.mark.usefixtures("example")
def test_replies_sampled_together_have_the_log_probabilities_that_the_trainer_computes(
    tmp_path: Path,
) -> None:
    need("torch")
    import torch
    from tiny_grpo.engine import Engine, Sample
    from tiny_grpo.language import render_prompt
    from tiny_grpo.model import Policy, load_policy, save_weights, token_logprobs

    RunPaths(tmp_path).policy_version(0).parent.mkdir(parents=True)
    registry = PolicyRegistry(RunPaths(tmp_path))
    paths = [tmp_path / f"{version}.pt" for version in range(2)]
    for version, path in enumerate(paths):
        torch.manual_seed(version)
        save_weights(Policy(), path)
    prompts = [render_prompt([{"role": "user", "content": f"{n} minus {n * 7}"}]) for n in range(1, 41)]

    async def ask(engine: Engine) -> list[Sample]:
        waiting = (engine.sample(prompt, max_tokens=12, seed=n) for n, prompt in enumerate(prompts))
        return await asyncio.gather(*waiting)

    registry.publish(0, weights=str(paths[0]))
    engine = Engine(PolicyRegistry(RunPaths(tmp_path)))
    engine.start()
    try:
        first = asyncio.run(ask(engine))
        assert {sample.version for sample in first} == {0}
        registry.publish(1, weights=str(paths[1]))
        while asyncio.run(ask(engine))[0].version == 0:
            pass
        second = asyncio.run(ask(engine))
    finally:
        engine.stop()
    assert {sample.version for sample in second} == {1}
    for version, samples in enumerate((first, second)):
        policy = load_policy(paths[version])
        for prompt, sample in zip(prompts, samples, strict=True):
            with torch.inference_mode():
                again = token_logprobs(policy, torch.tensor([prompt + sample.ids]))[0, len(prompt) :]
            torch.testing.assert_close(torch.tensor(sample.logprobs), again, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("example")
def test_shuffled_rewards_stay_within_their_group() -> None:
    need("torch")
    import numpy as np
    from tiny_grpo.trainer import rewards_of

    class OneBatch:
        rollout_id = np.array([f"s/{n}" for n in range(16)])
        group_id = np.array([f"s/g{n // 8}" for n in range(16)])
        reward = np.array([1.0] * 3 + [0.0] * 5 + [1.0] * 6 + [0.0] * 2, np.float32)

    batch: Any = OneBatch
    plain = rewards_of([batch], shuffled_by=None)
    shuffled = rewards_of([batch], shuffled_by=1)
    assert list(plain.values()) == batch.reward.tolist()
    assert shuffled != plain
    for group, ones in (("s/g0", 3), ("s/g1", 6)):
        assert sum(shuffled[rollout] for rollout in batch.rollout_id[batch.group_id == group]) == ones


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_it_learns_although_both_sides_are_killed_and_not_from_shuffled_rewards(tmp_path: Path) -> None:
    need("bwrap")
    need("torch")
    learnt = run_loop(tmp_path / "learns")
    assert learnt >= 0.3
    assert run_loop(tmp_path / "control", "--control", "--steps", "10", "--held-out", "160") < 0.05


def run_loop(root: Path, *arguments: str) -> float:
    """Runs the loop in `root`, checks its table, and returns its gain."""
    done = subprocess.run(
        [sys.executable, "-m", "tiny_grpo", str(root), *arguments],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = [
        {name: float(value) for name, value in row.groupdict().items()}
        for row in map(ROW.fullmatch, lines)
        if row
    ]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == (10 if "--control" in arguments else 30)
    for row in rows:
        parts = ("trained", "even", "stale", "short", "open")
        assert row["submitted"] == sum(row[part] for part in parts)
        assert row["trained"] + row["even"] == GROUPS_PER_STEP * row["step"]
        assert row["low"] <= row["mean"] <= row["high"]
    assert max(row["high"] for row in rows) >= 1  # rollouts are under way while the trainer learns
    assert rows[0]["max_ratio"] == 1.0  # server and trainer compute the same numbers
    assert sum("SIGKILL to the trainer" in line for line in lines) == 2
    assert sum("SIGKILL to the server and workers" in line for line in lines) == 2
    assert lines[-2].endswith("groups lost or repeated: 0")
    last = LAST_LINE.fullmatch(lines[-1])
    assert last is not None
    return float(last[3])
