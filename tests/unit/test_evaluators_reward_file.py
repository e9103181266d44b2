"""Verifiers that write a reward: only what the verifier wrote counts."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from hpcroll.config import EvaluationConfig
from hpcroll.contract import Task, Verdict
from hpcroll.evaluators.reward_file import CommandSpec, RewardFileEvaluator, pack_outputs, read_reward
from hpcroll.testing.evaluator_suite import Case, EvaluatorContract
from tests.directories import directory_sandbox, fresh_directories

CHECK = 'if [ "$(cat made.txt)" = yes ]; then echo 1; else echo 0; fi > "$HPCROLL_REWARD"'


def task(**spec: object) -> Task:
    return Task.model_validate(
        {"task_id": "t", "handler": "command", "prompt": "p", "spec": {"verify": CHECK, **spec}}
    )


def outputs(files: dict[str, str], root: Path, **spec: object) -> dict[str, bytes]:
    """What `pack_outputs` makes of a sandbox with these files."""

    async def run() -> dict[str, bytes]:
        sandbox = directory_sandbox(root)
        for path, text in files.items():
            await sandbox.put(text.encode(), path)
        found = await pack_outputs(CommandSpec.model_validate(task(**spec).spec), sandbox)
        return dict(found)

    return asyncio.run(run())


def evaluate(artefacts: dict[str, bytes], root: Path, **spec: object) -> Verdict:
    evaluator = RewardFileEvaluator(EvaluationConfig())
    return asyncio.run(evaluator.evaluate(task(**spec), artefacts, fresh_directories(root)))


class TestRewardFileEvaluator(EvaluatorContract):
    def make(self) -> RewardFileEvaluator:
        return RewardFileEvaluator(EvaluationConfig())

    def cases(self) -> list[Case]:
        spec = {"verify": 'grep -c yes "$HPCROLL_ANSWER" > "$HPCROLL_REWARD"'}
        asked = Task.model_validate({"task_id": "t", "handler": "command", "prompt": "p", "spec": spec})
        return [Case(asked, {"answer": b"yes"}, {"answer": b"no"})]


def test_outputs_of_the_agent_reach_the_verifier(tmp_path: Path) -> None:
    assert evaluate(outputs({"made.txt": "yes"}, tmp_path), tmp_path).reward == 1.0
    assert evaluate(outputs({"made.txt": "no"}, tmp_path), tmp_path).reward == 0.0


def test_only_the_named_outputs_travel(tmp_path: Path) -> None:
    packed = outputs({"made.txt": "yes", "other.txt": "x"}, tmp_path, outputs=["other.txt"])
    assert evaluate(packed, tmp_path, outputs=["other.txt"]).reward == 0.0


def test_reward_and_verifier_of_the_agents_own_making_count_for_nothing(tmp_path: Path) -> None:
    spec = {
        "verifier": {"check.sh": 'echo 0 > "$HPCROLL_REWARD"\n'},
        "verify": "sh verifier/check.sh; sh verifier/extra.sh",
    }
    forged = {"reward.txt": "1", "verifier/extra.sh": "echo 1 > reward.txt"}
    assert evaluate(outputs(forged, tmp_path), tmp_path, **spec).reward == 0.0
    silent = evaluate(outputs({"reward.txt": "1"}, tmp_path), tmp_path, verify="true")
    assert silent.reward is None


def test_verifier_without_a_reward_gives_none_and_says_so(tmp_path: Path) -> None:
    found = evaluate({}, tmp_path, verify="echo broken >&2; exit 3")
    assert found.reward is None
    assert "wrote nothing" in str(found.no_reward_because)
    assert found.exit_code == 3
    assert "broken" in found.log_tail


def test_outputs_past_the_limit_earn_nothing(tmp_path: Path) -> None:
    noise = random.Random(3).randbytes(4096).hex()
    packed = outputs({"big.txt": noise}, tmp_path, outputs_bytes=1024)
    assert list(packed) == ["outputs_error"]
    assert evaluate(packed, tmp_path).reward == 0.0


def test_json_rewards_carry_components() -> None:
    assert read_reward(b'{"reward": 0.5, "style": 1}', is_json=True) == (0.5, {"style": 1.0})


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        (b"", False),
        (b"nan", False),
        (b"good", False),
        (b"[1]", True),
        (b'{"score": 1}', True),
        (b"\xff", False),
    ],
)
def test_what_is_no_number_is_no_reward(text: bytes, is_json: bool) -> None:
    with pytest.raises(ValueError, match=r"nothing|finite|to float|object|codec"):
        read_reward(text, is_json=is_json)
