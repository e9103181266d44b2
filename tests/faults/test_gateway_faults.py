"""Whatever goes wrong around a model call ends in a labelled record or a clean retry.

No sampled token that reached the gateway is lost, and none is trained on twice or where the agent did not get
the reply.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from hpcroll.config import ModelConfig
from hpcroll.contract import PolicyId, RecordedCall
from hpcroll.gateway import Gateway, GatewaySession, Journal, read_journal
from hpcroll.testing.policy_server import Behaviour, PolicyServer, Script, Turn
from hpcroll.testing.policy_server.faults import UNSAMPLED, Fault, FaultKind
from hpcroll.testing.policy_server.record import Sampled
from hpcroll.testing.tiny_tokenizer import write_tokenizer
from hpcroll.trajectory import build
from tests.capabilities import need
from tests.faults.gateway_agent import FREE_AFTER, FULL_AFTER, PROMPT, rollout

AGENT = Path(__file__).with_name("gateway_agent.py")
TEXT = "one two three four five six seven eight nine ten " * 6
TRIED_AGAIN = {FaultKind.STATUS}
KILLS = 6
HARMLESS = {FaultKind.VERSION}
"""The reply is good; what is special about it is in the record."""


@asynccontextmanager
async def session_of(
    root: Path, fault: Fault, mode: str, **options: Any
) -> AsyncIterator[tuple[PolicyServer, GatewaySession, Journal]]:
    # The first reply is struck, those after it are well.
    turn = Turn(text=TEXT, fault=fault)
    script = Script(prompt=PROMPT, behaviours=(Behaviour(name="struck", turns=(turn,), count="requests"),))
    server = PolicyServer([script], template="qwen3", noncanonical=1.0, version=3)
    async with server:
        fields: dict[str, Any] = {"endpoints": [server.base_url], "call_tries": 2, "mode": mode, **options}
        if mode == "tokens":
            fields["tokens"] = {"tokenizer": str(write_tokenizer(root / "tokenizer")), "renderer": "qwen3"}
        journal = Journal(root / "journal")
        journal.open()
        gateway = Gateway(ModelConfig.model_validate(fields), journal=journal, policy=_policy)
        await gateway.start()
        try:
            yield server, gateway.open_session(rollout(), 1), journal
        finally:
            await gateway.close()
            await journal.close()


def _policy() -> PolicyId:
    return PolicyId(policy_name="policy", lineage="main", version_low=3, version_high=3)


async def ask(session: GatewaySession, *, stream: bool) -> int:
    """The status; 0 where a stream ended in an error."""
    headers = {"Authorization": f"Bearer {session.outside.api_key}"}
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": stream}
    url = f"{session.outside.base_url}/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as response:
        text = await response.text()
        return 0 if stream and response.status == 200 and not text.endswith("[DONE]\n\n") else response.status


def account(calls: list[RecordedCall], log: list[Sampled]) -> None:
    """Every reply that the server sampled has one record: whole, or cut where it broke off."""
    left = list(log)
    for call in calls:
        found = call.tokens.sampled_ids.tolist()
        if not found:
            continue
        sampled = next(item for item in left if list(item.sampled_ids[: len(found)]) == found)
        left.remove(sampled)
        assert call.tokens.prompt_ids.tolist() == list(sampled.prompt_ids)
        known = np.isfinite(call.tokens.logprobs)
        expected = np.asarray(sampled.logprobs[: len(found)], np.float32)
        assert np.array_equal(call.tokens.logprobs[known], expected[known])
        if call.call.error is None:
            assert len(found) == len(sampled.sampled_ids)
    built = build(calls)
    spans = {span.call_index: span for span in built.call_spans}
    dropped = {drop.call_index: drop.length for drop in built.dropped}
    assert len(spans) == len(built.call_spans)
    for call in calls:
        index, length = call.call.call_index, len(call.tokens.sampled_ids)
        span = spans.get(index)
        assert dropped.get(index, 0) + (0 if span is None else span.length) == length
        if span is not None and call.call.error is not None:
            tokens = built.tokens[span.segment_index]
            assert not tokens.loss_mask[span.start : span.start + span.length].any()


@pytest.mark.parametrize("mode", ["chat", "tokens"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.STALL])
def test_struck_reply_is_labelled_or_tried_again(
    tmp_path: Path, kind: FaultKind, stream: bool, mode: str
) -> None:
    async def scenario() -> None:
        fault = Fault(kind=kind, after_tokens=5)
        async with session_of(tmp_path, fault, mode) as (server, session, journal):
            first = await ask(session, stream=stream)
            second = await ask(session, stream=stream)
            await session.close()
            calls = session.calls
            assert second == 200
            assert calls[-1].call.error is None
            tried_again = kind in TRIED_AGAIN or (kind is FaultKind.RESET and not stream)
            if kind in HARMLESS or tried_again:
                assert first == 200
                assert [call.call.error for call in calls] == [None] * 2
            else:
                assert first in (0, 502)
                assert calls[0].call.error
                assert calls[0].call.reply is None
            if kind is FaultKind.VERSION:
                found = calls[0].call.policy
                assert found is not None
                assert found.version_high == 4
            account(calls, server.sampled)
            assert [item.call for item in read_journal(journal.path)] == [call.call for call in calls]
            if kind in UNSAMPLED:
                assert len(server.sampled) == len([call for call in calls if call.call.error is None])

    run(scenario)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_server_that_is_busy_or_broken_is_asked_again(tmp_path: Path, status: int) -> None:
    async def scenario() -> None:
        fault = Fault(kind=FaultKind.STATUS, status=status, retry_after_s=0.1)
        async with session_of(tmp_path, fault, "chat") as (server, session, _):
            assert await ask(session, stream=True) == 200
            assert [call.call.error for call in session.calls] == [None]
            account(session.calls, server.sampled)

    run(scenario)


@pytest.mark.parametrize("mode", ["chat", "tokens"])
def test_reply_that_stalls_ends_at_the_time_limit_with_what_came(tmp_path: Path, mode: str) -> None:
    async def scenario() -> None:
        fault = Fault(kind=FaultKind.STALL, after_tokens=5)
        async with session_of(tmp_path, fault, mode, call_timeout_s=1.0) as (server, session, _):
            assert await ask(session, stream=True) == 0
            (call,) = session.calls
            assert "took over 1 s" in str(call.call.error)
            assert 0 < len(call.tokens.sampled_ids) <= 5
            account(session.calls, server.sampled)

    run(scenario)


def test_gateway_killed_in_mid_call_has_what_any_agent_saw(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    """Six kills at seeded moments: every reply that was whole for the agent is whole in the journal."""
    script = Script(
        prompt=PROMPT, behaviours=(Behaviour(name="long", turns=(Turn(text=TEXT),), count="requests"),)
    )
    log = tmp_path / "log.jsonl"
    url = serve_scripts([script], log=log)
    seeded = random.Random(7)
    killed_in_mid_call = 0
    for number in range(KILLS):
        journal = tmp_path / f"journal-{number}"
        argv = [sys.executable, str(AGENT), url, str(journal), "1000"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=_env(), cwd=_root()) as agent:
            assert agent.stdout is not None
            seen = [json.loads(agent.stdout.readline()) for _ in range(seeded.randint(1, 12))]
            os.kill(agent.pid, signal.SIGKILL)
            seen += [json.loads(line) for line in agent.stdout.read().splitlines()]
        calls = list(read_journal(journal))
        whole = [call for call in calls if call.call.error is None]
        assert len([line for line in seen if line["whole"]]) == len(seen) <= len(whole) <= len(seen) + 1
        killed_in_mid_call += len(whole) == len(seen)
        assert [call.call.call_index for call in calls] == list(range(len(calls)))
        build(calls)
    assert killed_in_mid_call
    sampled = {tuple(json.loads(line)["sampled_ids"]) for line in log.read_text().splitlines()}
    for number in range(KILLS):
        for call in read_journal(tmp_path / f"journal-{number}"):
            assert tuple(call.tokens.sampled_ids.tolist()) in sampled


def test_full_disk_withholds_replies_and_loses_none_that_was_shown(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need("userns")
    script = Script(
        prompt=PROMPT, behaviours=(Behaviour(name="long", turns=(Turn(text=TEXT),), count="requests"),)
    )
    url = serve_scripts([script], log=tmp_path / "log.jsonl")
    small = tmp_path / "small"
    small.mkdir()
    inside = (
        f"mount -t tmpfs -o size=96k none {small} && "
        f'"$@" {url} {small}/journal 9 {small}/filler && cp {small}/journal {tmp_path}/journal'
    )
    argv = ["unshare", "-rm", "sh", "-c", inside, "sh", sys.executable, str(AGENT)]
    done = subprocess.run(argv, capture_output=True, text=True, env=_env(), cwd=_root(), timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [None] * FULL_AFTER + ["not_recorded"] * (FREE_AFTER - FULL_AFTER) + [None] * 3
    assert [line["error"] for line in lines] == expected
    calls = list(read_journal(tmp_path / "journal"))
    assert [call.call.call_index for call in calls] == [
        line["call"] for line in lines if line["error"] is None
    ]
    assert all(len(call.tokens.prompt_ids) and len(call.tokens.sampled_ids) for call in calls)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_root())}


def _root() -> Path:
    return Path(__file__).parents[2]


def run(scenario: Callable[[], Any]) -> None:
    async def within() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(within())
