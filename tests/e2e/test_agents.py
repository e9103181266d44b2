"""Real agent programs, unmodified, in sandboxes without network: their records hold what was sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hpcroll.contract import SegmentStart, Status
from hpcroll.testing import check
from hpcroll.testing.policy_server.faults import Fault, FaultKind
from tests.agent_runs import assert_solved, roll_out
from tests.agents import AGENTS, work
from tests.capabilities import need
from tests.round_trip import Told, recorded, share_noncanonical

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(1500)]

EVERYWHERE = ("mini_swe_agent", "pi")
"""Tried in every run of the tests; the others take longer."""
LOOK, LONG_LOOK = "seq 1 250", "yes 'a line of plain words' | head -c 14000"
COMPACTING = (
    ("claude_code", "chat", 56_000, LOOK, 0),
    ("cline", "chat", 18_000, LOOK, 0),
    ("codex", "tokens", 24_000, LOOK, 0),
    ("kilo_code", "tokens", 34_000, LOOK, 0),
    ("mistral_vibe", "tokens", 20_000, LOOK, 0),
    ("opencode", "tokens", 20_000, LOOK, 0),
    ("pi", "chat", 64_000, LONG_LOOK, 1),
)
"""Agent, mode, tokens of a context that does not hold the session, what fills it, calls that it refuses."""


@pytest.mark.parametrize(
    "name", [name if name in EVERYWHERE else pytest.param(name, marks=pytest.mark.full) for name in AGENTS]
)
def test_an_agent_solves_a_task_and_its_record_holds_what_was_sampled(
    name: str, tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need(f"agent:{name}")
    agent = AGENTS[name]
    done = roll_out(agent, work(agent), tmp_path, serve_scripts)
    assert_solved(agent, done)
    assert share_noncanonical(done.told.entries) >= 0.25
    assert any(agent.refusal in request for request in done.requests)
    replies = [recorded.call.reply for recorded in done.calls]
    assert any(isinstance(reply, dict) and len(reply.get("tool_calls") or ()) == 2 for reply in replies)
    runs = [run for segment in done.trajectory.record.segments for run in segment.policy_runs]
    assert {run.version_low for run in runs} == {3, 4}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mode", "context_tokens", "look", "refused"), COMPACTING, ids=[case[0] for case in COMPACTING]
)
def test_an_agent_that_compacts_its_history_forks_and_loses_nothing(
    name: str,
    mode: str,
    context_tokens: int,
    look: str,
    refused: int,
    tmp_path: Path,
    serve_scripts: Callable[..., str],
) -> None:
    need(f"agent:{name}")
    agent = AGENTS[name]
    behaviour = work(agent, rounds=12, look=look)
    done = roll_out(agent, behaviour, tmp_path, serve_scripts, mode=mode, context_tokens=context_tokens)
    assert_solved(agent, done, refused=refused)
    assert any(entry["kind"] == "side" for entry in done.told.entries), "no request for a summary"
    lengths = [len(entry["prompt_ids"]) for entry in done.told.entries if entry["kind"] == "main"]
    assert any(after < before - 2000 for before, after in pairwise(lengths)), lengths
    began = [segment.began for segment in done.trajectory.record.segments]
    assert SegmentStart.CONTEXT_REWRITTEN in began, began


@pytest.mark.full
@pytest.mark.parametrize("name", ["claude_code", "codex", "continue_cli", "mistral_vibe", "opencode", "pi"])
def test_a_stream_that_breaks_is_asked_for_again_and_both_replies_are_kept(
    name: str, tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need(f"agent:{name}")
    agent = AGENTS[name]
    fault = Fault(kind=FaultKind.RESET, after_tokens=6)
    done = roll_out(agent, work(agent, fault=fault), tmp_path, serve_scripts)
    record = done.trajectory.record
    assert (record.status, record.reward) == (Status.COMPLETED, 1.0), record.failure
    assert check(done.trajectory, done.calls) == ()
    [broken] = [call for call in record.calls if call.error]
    [struck] = [entry for entry in done.told.entries if entry["ended"] == "fault"]
    [span] = [span for span in record.call_spans if span.call_index == broken.call_index]
    tokens = done.trajectory.tokens[span.segment_index]
    assert tokens.ids[: span.start].tolist() == struck["prompt_ids"]
    sampled = tokens.ids[span.start : span.start + span.length].tolist()
    assert sampled == struck["sampled_ids"][: len(sampled)]
    assert not tokens.loss_mask[span.start : span.start + span.length].any()
    whole = Told(tuple(entry for entry in done.told.entries if entry is not struck))
    kept = recorded(done.trajectory)
    assert whole.keys() - kept == Counter()
    assert sum((kept - whole.keys()).values()) == 1
