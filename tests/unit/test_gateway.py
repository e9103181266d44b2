"""The gateway records what was sampled, forces what is configured, and says plainly what went wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from hpcroll.config import ModelConfig, SeedPolicy
from hpcroll.contract import LogprobKind, PolicyId, Rollout, RolloutRef, Sampling, StopReason, Task
from hpcroll.errors import ConfigError, ModelError, SpoolError
from hpcroll.gateway import Gateway, GatewaySession, Journal, ModelEndpoint, Upstream, read_journal
from hpcroll.gateway.balance import Balance
from hpcroll.gateway.overflow import is_overflow, read_lengths
from hpcroll.gateway.refusal import Lengths
from hpcroll.gateway.upstream import UpstreamRefusal
from hpcroll.testing.harness_suite import until
from hpcroll.testing.policy_server import PolicyServer, Script, Turn, solves
from hpcroll.testing.policy_server.script import Behaviour, ToolCall
from hpcroll.trajectory import shaped_because
from tests.serving import serving

PROMPT = "Say hello, naïve world."
SCRIPT = Script(prompt=PROMPT, behaviours=(solves(["echo hello"], "hello"),))
MESSAGES = [{"role": "user", "content": PROMPT}]
REPLY = {
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []},
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Upside:
    """An inference server that answers as it is told, the last answer for ever."""

    answers: list[Answer]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self.answers[min(len(self.bodies), len(self.answers)) - 1](request)


def says(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(data, status=status, headers=headers)

    return answer


def streams(*chunks: Any) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return response

    return answer


def prefers(session: str, server: str, other: str) -> bool:
    """Whether a session's first call goes to `server` and not to `other`."""
    return Balance().choose(session, [server, other]) == server


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def upside(*answers: Answer) -> AsyncIterator[Upside]:
    server = Upside(list(answers))
    async with serving(web.post("/v1/chat/completions", server.chat)) as server.url:
        yield server


@asynccontextmanager
async def gateway(root: Path, *urls: str, **options: Any) -> AsyncIterator[tuple[Gateway, Journal]]:
    policy = options.pop("policy", lambda: None)
    upstreams = options.pop("upstreams", tuple)
    config = ModelConfig.model_validate({"endpoints": urls, "call_tries": 2, **options})
    journal = Journal(root / "journal")
    journal.open()
    gate = Gateway(config, journal=journal, policy=policy, upstreams=upstreams)
    await gate.start()
    try:
        yield gate, journal
    finally:
        await gate.close()
        await journal.close()


def rollout(ordinal: int = 0) -> Rollout:
    task = Task(task_id="t", handler="command", prompt=PROMPT)
    ref = RolloutRef(segment="0" * 16, ordinal=ordinal)
    return Rollout(ref=ref, task=task, sample_index=0, group_size=1)


async def post(endpoint: ModelEndpoint, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, json={"messages": MESSAGES, **body}, headers=headers) as response,
    ):
        if response.content_type == "text/event-stream":
            return response.status, [
                line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")
            ]
        return response.status, await response.json()


def error_of(answer: Any) -> dict[str, Any]:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


@pytest.mark.parametrize(
    ("body", "purpose"),
    [
        ({}, "main"),
        ({"model": "policy"}, "main"),
        ({"model": "gpt-5"}, "main"),
        ({"model": "policy-auxiliary"}, "auxiliary"),
        ({"model": "hpcroll/policy-subagent"}, "subagent"),
        ({"model": "policy", "max_tokens": 1}, "auxiliary"),
    ],
)
def test_name_of_the_model_that_an_agent_asks_for_declares_what_the_call_is_for(
    tmp_path: Path, body: dict[str, Any], purpose: str
) -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT]) as server, gateway(tmp_path, server.base_url) as (gate, _):
            session = gate.open_session(rollout(), 1)
            status, answer = await post(session.outside, **body)
            assert (status, answer["model"]) == (200, "policy")
            assert session.calls[0].call.purpose == purpose

    run(scenario)


def test_recorded_tokens_are_those_that_the_server_sampled_also_when_streamed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            PolicyServer([SCRIPT], noncanonical=1.0) as server,
            gateway(tmp_path, server.base_url) as (
                gate,
                journal,
            ),
        ):
            session = gate.open_session(rollout(), 1)
            messages: list[Any] = list(MESSAGES)
            status, whole = await post(session.outside, messages=messages)
            assert status == 200
            messages += [whole["choices"][0]["message"], {"role": "tool", "content": "hello"}]
            status, chunks = await post(session.outside, messages=messages, stream=True)
            assert chunks[-1] == "[DONE]"
            deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[:-1]]
            assert "".join(delta.get("content") or "" for delta in deltas) == "This is my answer."
            pieces = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
            assert pieces[0]["name"] == "submit"
            assert "".join(piece["arguments"] for piece in pieces) == '{"answer": "hello"}'
            await session.close()
            for call, sampled in zip(session.calls, server.sampled, strict=True):
                assert call.tokens.prompt_ids.tolist() == list(sampled.prompt_ids)
                assert call.tokens.sampled_ids.tolist() == list(sampled.sampled_ids)
                assert call.tokens.logprobs.tolist() == list(sampled.logprobs)
                assert call.call.finish_reason == sampled.finish_reason == "tool_calls"
                assert call.call.logprob_kind is LogprobKind.RAW
            assert [call.call.messages_from for call in session.calls] == [0, 2]
            assert session.calls[1].call.reply["tool_calls"][0]["function"]["name"] == "submit"
            assert session.calls[1].call.latency.first_token_s is not None
            assert [item.call for item in read_journal(journal.path)] == [c.call for c in session.calls]

    run(scenario)


def test_agent_sees_no_token_fields_and_no_logprobs_unless_it_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT]) as server, gateway(tmp_path, server.base_url) as (gate, _):
            session = gate.open_session(rollout(), 1)
            for asked in (False, True):
                for stream in (False, True):
                    _, answer = await post(session.outside, logprobs=asked, stream=stream)
                    text = json.dumps(answer)
                    assert "token_ids" not in text
                    assert "weight_version" not in text
                    assert ("logprob" in text) is asked

    run(scenario)


def test_configured_sampling_overrules_the_agent_and_both_are_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        forced = {"temperature": 0.7, "max_tokens": 50}
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url, sampling=forced) as (gate, _):
            session = gate.open_session(rollout(), 1)
            await post(session.outside, temperature=0.1, top_p=0.5, max_completion_tokens=9999, stop="x")
            body, call = server.bodies[0], session.calls[0].call
            assert call.sampling_asked == Sampling(temperature=0.1, top_p=0.5, max_tokens=9999, stop=("x",))
            plain = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
            plain |= {"presence_penalty": 0, "frequency_penalty": 0}
            assert call.sampling_effective == Sampling(**plain, **forced, stop=("x",))
            assert {name: body[name] for name in (*plain, *forced)} == {**plain, **forced}
            assert "max_completion_tokens" not in body
            assert body["logprobs"] is body["return_token_ids"] is True

    run(scenario)


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"logit_bias": {"5": 1}},
        {"guided_regex": "a+"},
    ],
)
def test_constrained_sampling_reaches_the_server_and_is_not_trained_on(
    tmp_path: Path, constraint: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, _):
            session = gate.open_session(rollout(), 1)
            assert (await post(session.outside, **constraint))[0] == 200
            assert constraint.items() <= server.bodies[0].items()
            call = session.calls[0].call
            assert call.constraints == tuple(constraint)
            assert shaped_because(call) == f"sampling constrained by {next(iter(constraint))}"

    run(scenario)


@pytest.mark.parametrize("seeds", SeedPolicy)
def test_seed_of_a_call_is_the_runs_to_decide(tmp_path: Path, seeds: SeedPolicy) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url, seeds=seeds) as (gate, _):
            for attempt in (1, 1, 2):
                session = gate.open_session(rollout(), attempt)
                await post(session.outside, seed=5)
                await session.close()
            first, again, other = (body.get("seed") for body in server.bodies)
            assert first == again
            if seeds is SeedPolicy.DERIVED:
                assert 0 <= first < 1 << 31
                assert first != other
            else:
                assert (first, other) == ((5, 5) if seeds is SeedPolicy.AGENT else (None, None))

    run(scenario)


def test_empty_fields_of_a_reply_are_left_out_so_that_it_comes_back_unchanged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, _):
            session = gate.open_session(rollout(), 1)
            _, answer = await post(session.outside)
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
            assert session.calls[0].call.reply == {"role": "assistant", "content": "hi"}

    run(scenario)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": 7}]}, "invalid_request"),
        ({"messages": []}, "invalid_request"),
        ({"messages": [1]}, "invalid_request"),
        ({"n": 2}, "unsupported"),
        ({"tools": 7}, "invalid_request"),
        ({"temperature": -1}, "invalid_request"),
        ({"stop": 3}, "invalid_request"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(tmp_path: Path, body: Any, code: str) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, _):
            session = gate.open_session(rollout(), 1)
            status, answer = await post(session.outside, **body)
            assert status == 400
            assert error_of(answer)["code"] == code
            assert server.bodies == []
            assert session.calls == []
            assert session.error is None

    run(scenario)


def test_wrong_or_closed_key_gets_401_and_reaches_no_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, _):
            session, other = gate.open_session(rollout(), 1), gate.open_session(rollout(1), 1)
            right = session.outside
            assert right.api_key != other.outside.api_key
            await other.close()
            for key in ("", "hpcroll", "x", right.api_key[:-1], other.outside.api_key):
                status, answer = await post(ModelEndpoint(right.base_url, key, right.model))
                assert status == 401
                assert error_of(answer)["code"] == "invalid_api_key"
            assert server.bodies == []
            assert (await post(right))[0] == 200

    run(scenario)


def test_socket_handed_out_of_a_sandbox_serves_its_session_with_any_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, _):
            session = gate.open_session(rollout(), 2)
            sock = socket.create_server(("127.0.0.1", 0))
            inside = await session.serve_inside(sock)
            assert inside.base_url == f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
            assert (await post(ModelEndpoint(inside.base_url, "any", "m")))[0] == 200
            async with aiohttp.ClientSession() as client, client.get(f"{inside.base_url}/models") as response:
                assert (await response.json())["data"][0]["id"] == "policy"
            assert [call.call.attempt for call in session.calls] == [2]
            await session.close()
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(inside)

    run(scenario)


def drop(*path: str) -> dict[str, Any]:
    data = json.loads(json.dumps(REPLY))
    node = data if path[0] != "choice" else data["choices"][0]
    del node[path[-1]]
    return data


def with_logprobs(*values: float) -> dict[str, Any]:
    data = json.loads(json.dumps(REPLY))
    data["choices"][0]["logprobs"] = {"content": [{"logprob": value} for value in values]}
    return data


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (drop("prompt_token_ids"), "no prompt_token_ids"),
        (drop("choice", "token_ids"), "no token_ids"),
        (drop("choice", "logprobs"), "0 log-probabilities for 2 token_ids"),
        (with_logprobs(-1.0), "1 log-probabilities for 2 token_ids"),
        (drop("choice", "finish_reason"), "no finish_reason"),
        ({**REPLY, "usage": {"completion_tokens": 3}}, "2 token_ids, and its usage counts 3"),
        ({**REPLY, "prompt_token_ids": [1, -1]}, "not a list of unsigned"),
        ({**REPLY, "prompt_token_ids": [1, 1 << 32]}, "not a list of unsigned"),
        ({**REPLY, "prompt_token_ids": ["1"]}, "not a list of unsigned"),
        (with_logprobs(-1.0, float("nan")), "not finite"),
        ({"choices": [7]}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_reply_that_cannot_be_trained_on_is_a_model_error_that_says_why(
    tmp_path: Path, reply: Any, words: str
) -> None:
    async def scenario() -> None:
        async with upside(says(reply)) as server, gateway(tmp_path, server.url) as (gate, _):
            session = gate.open_session(rollout(), 1)
            status, answer = await post(session.outside)
            assert status == 502
            assert words in error_of(answer)["message"]
            assert isinstance(session.error, ModelError)
            assert words in str(session.calls[0].call.error)
            assert session.calls[0].call.reply is None

    run(scenario)


def test_busy_and_broken_servers_are_left_for_another_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        for bad in (says({}, 503), says({}, 429, {"Retry-After": "0"}), hangs_up):
            async with upside(bad) as broken, upside(says(REPLY)) as good:
                name = f"{id(bad)}"
                (tmp_path / name).mkdir()
                urls = (broken.url, f"{good.url}/v1/")
                async with gateway(tmp_path / name, *urls) as (gate, _):
                    # A session whose first choice is the broken one: equally loaded servers are hashed.
                    names = (rollout(ordinal) for ordinal in range(100))
                    chosen = next(r for r in names if prefers(f"{r.rollout_id}.1", broken.url, good.url))
                    session = gate.open_session(chosen, 1)
                    assert [(await post(session.outside))[0] for _ in range(3)] == [200] * 3
                    # Affinity: once a server took a call of the session, the next ones go there.
                    assert (len(broken.bodies), len(good.bodies)) == (1, 3)
                    assert session.error is None

    run(scenario)


def test_servers_that_appear_later_are_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        listed: list[Upstream] = []
        async with (
            upside(says(REPLY)) as server,
            gateway(tmp_path, upstreams=lambda: listed, call_tries=5) as (gate, _),
        ):
            session = gate.open_session(rollout(), 1)
            waiting = asyncio.ensure_future(post(session.outside))
            await asyncio.sleep(0)
            listed.append(Upstream(server.url))
            assert (await waiting)[0] == 200

    run(scenario)


def test_concurrent_sessions_spread_over_the_servers(tmp_path: Path) -> None:
    async def scenario() -> None:
        everyone = asyncio.Event()
        arrived = []

        async def waits(request: web.Request) -> web.StreamResponse:
            arrived.append(request)
            if len(arrived) == 4:
                everyone.set()
            await everyone.wait()
            return web.json_response(REPLY)

        async with (
            upside(waits) as one,
            upside(waits) as two,
            gateway(tmp_path, one.url, two.url) as (
                gate,
                _,
            ),
        ):
            sessions = [gate.open_session(rollout(ordinal), 1) for ordinal in range(4)]
            await asyncio.gather(*(post(session.outside) for session in sessions))
            assert (len(one.bodies), len(two.bodies)) == (2, 2)

    run(scenario)


def test_inference_side_that_stays_away_is_a_policy_failure_in_openai_shape(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            upside(says({"error": {"message": "full"}}, 503)) as server,
            gateway(tmp_path, server.url) as (gate, _),
        ):
            session = gate.open_session(rollout(), 1)
            status, answer = await post(session.outside)
            assert status == 502
            assert "503: full" in error_of(answer)["message"]
            assert server.url not in json.dumps(answer)
            assert server.url in str(session.error)
            assert isinstance(session.error, ModelError)
            assert len(server.bodies) == 2
            assert "503: full" in str(session.calls[0].call.error)
            server.answers.append(says(REPLY))
            assert (await post(session.outside))[0] == 200
            assert session.error is None

    run(scenario)


def test_call_that_takes_too_long_ends_as_a_model_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def never(request: web.Request) -> web.StreamResponse:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        async with upside(never) as server, gateway(tmp_path, server.url, call_timeout_s=0.2) as (gate, _):
            session = gate.open_session(rollout(), 1)
            assert (await post(session.outside))[0] == 502
            assert isinstance(session.error, ModelError)
            await ended.wait()

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 100 tokens. However, you requested 140 tokens (120 in the "
        "messages, 20 in the completion).",
        "This model's maximum context length is 100 tokens. However, your prompt contains 120 input tokens.",
        "This model's maximum context length is 100 tokens. However, your prompt contains at least 120 input "
        "tokens, which exceeds this limit.",
        "The decoder prompt (length 120) is longer than the maximum model length of 100.",
    ],
)
def test_lengths_are_read_from_what_servers_say(message: str) -> None:
    refusal = UpstreamRefusal(Upstream("http://server"), 400, message, 400)
    assert is_overflow(refusal)
    assert read_lengths(refusal) == Lengths(longest=100, found=120)


def test_kind_of_log_probabilities_is_the_configs_where_the_server_does_not_say(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            upside(says(REPLY)) as server,
            gateway(tmp_path, server.url, logprobs="sampling", sampling={"temperature": 0.5}) as (gate, _),
        ):
            session = gate.open_session(rollout(), 1)
            await post(session.outside)
            call = session.calls[0].call
            assert call.logprob_kind is LogprobKind.SAMPLING
            assert shaped_because(call) is None

    run(scenario)


def overflow(longest: int, prompt: int, completion: int) -> Answer:
    text = (
        f"This model's maximum context length is {longest} tokens. However, you requested "
        f"{prompt + completion} tokens ({prompt} in the messages, {completion} in the completion)."
    )
    return says({"error": {"message": text, "type": "BadRequestError", "code": 400}}, 400)


def test_prompt_that_the_server_cannot_hold_is_the_context_limit_until_it_is_shortened(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with (
            upside(overflow(100, 120, 20), says(REPLY)) as server,
            gateway(tmp_path, server.url) as (
                gate,
                _,
            ),
        ):
            session = gate.open_session(rollout(), 1)
            status, answer = await post(session.outside)
            assert status == 400
            assert error_of(answer)["code"] == "context_length_exceeded"
            assert session.limit is StopReason.CONTEXT_LIMIT
            assert session.error is None
            assert (await post(session.outside))[0] == 200
            assert session.limit is None

    run(scenario)


def test_prompt_that_fits_without_the_whole_reply_gets_the_room_there_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            upside(overflow(100, 90, 4096), says(REPLY)) as server,
            gateway(tmp_path, server.url) as (gate, _),
        ):
            session = gate.open_session(rollout(), 1)
            assert (await post(session.outside))[0] == 200
            assert [body["max_tokens"] for body in server.bodies] == [4096, 10]
            assert session.calls[0].call.sampling_effective.max_tokens == 10

    run(scenario)


def test_call_longer_than_the_configured_context_is_not_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        reply = json.loads(json.dumps(REPLY))
        reply["prompt_token_ids"] = list(range(63))
        async with (
            upside(says(reply)) as server,
            gateway(tmp_path, server.url, context_tokens=64) as (
                gate,
                _,
            ),
        ):
            session = gate.open_session(rollout(), 1)
            status, answer = await post(session.outside)
            assert (status, error_of(answer)["code"]) == (400, "context_length_exceeded")
            assert session.limit is StopReason.CONTEXT_LIMIT
            call = session.calls[0]
            assert call.call.reply is None
            assert call.tokens.sampled_ids.tolist() == [7, 8]

    run(scenario)


def test_rollout_that_sampled_its_share_is_refused_further_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            upside(says(REPLY)) as server,
            gateway(tmp_path, server.url, rollout_tokens=4) as (
                gate,
                _,
            ),
        ):
            session = gate.open_session(rollout(), 1)
            statuses = [(await post(session.outside))[0] for _ in range(3)]
            assert statuses == [200, 200, 400]
            assert [body["max_tokens"] for body in server.bodies] == [4, 2]
            assert session.limit is StopReason.TOKEN_LIMIT

    run(scenario)


def test_rollout_that_used_its_turns_is_refused_further_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, _):
            session = gate.open_session(rollout(), 1, max_calls=1)
            assert (await post(session.outside))[0] == 200
            status, answer = await post(session.outside)
            assert (status, error_of(answer)["code"]) == (400, "turn_limit")
            assert session.limit is StopReason.TURN_LIMIT

    run(scenario)


def policy(low: int, high: int) -> PolicyId:
    return PolicyId(policy_name="policy", lineage="l", version_low=low, version_high=high)


def test_version_that_the_engine_names_is_exact_and_a_silent_engine_gets_a_range(tmp_path: Path) -> None:
    async def scenario() -> None:
        named = {**REPLY, "metadata": {"weight_version": "6"}}
        unnamed = {**REPLY, "weight_version": "default"}
        answers = (says(named), says(REPLY, headers={"X-Policy-Version": "7"}), says(unnamed), says(REPLY))
        answers = (
            says({**REPLY, "choices": [{**REPLY["choices"][0], "meta_info": {"weight_version": 5}}]}),
            *answers,
        )
        published = iter([8, 8, 8, 8, 8, 8, 8, 8, 8, 9])
        async with (
            upside(*answers) as server,
            gateway(tmp_path, server.url, policy=lambda: policy(version := next(published), version)) as (
                gate,
                _,
            ),
        ):
            session = gate.open_session(rollout(), 1)
            for _ in answers:
                await post(session.outside)
            found = [call.call.policy for call in session.calls]
            assert found == [policy(5, 5), policy(6, 6), policy(7, 7), policy(7, 8), policy(8, 9)]

    run(scenario)


def test_weight_update_in_the_middle_of_a_streamed_reply_is_a_range(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            PolicyServer([SCRIPT], version=3, token_latency_s=0.01) as server,
            gateway(tmp_path, server.base_url) as (gate, _),
        ):
            session = gate.open_session(rollout(), 1)
            reply = asyncio.ensure_future(post(session.outside, stream=True))
            await until(lambda: bool(server.sampled))
            server.set_version(4)
            assert (await reply)[0] == 200
            found = session.calls[0].call.policy
            assert found is not None
            assert (found.version_low, found.version_high) == (3, 4)

    run(scenario)


def test_stream_that_breaks_off_is_an_error_event_and_keeps_its_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        opening = {"prompt_token_ids": [1, 2], "choices": [{"delta": {"role": "assistant", "content": ""}}]}
        token = {
            "choices": [
                {"delta": {"content": "h"}, "token_ids": [9], "logprobs": {"content": [{"logprob": -1.0}]}}
            ]
        }
        broken = {"error": {"message": "engine died"}}
        async with (
            upside(streams(opening, token), streams(opening, token, broken)) as server,
            gateway(tmp_path, server.url) as (gate, _),
        ):
            session = gate.open_session(rollout(), 1)
            for index, words in enumerate(("ended in the middle", "engine died")):
                _, chunks = await post(session.outside, stream=True)
                assert words in error_of(json.loads(chunks[-1]))["message"]
                assert "[DONE]" not in chunks
                assert session.calls[index].tokens.sampled_ids.tolist() == [9]
                assert session.calls[index].call.error is not None
            assert isinstance(session.error, ModelError)

    run(scenario)


def test_tool_calls_and_the_end_of_a_stream_wait_for_the_journal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT]) as server, gateway(tmp_path, server.base_url) as (gate, journal):
            session = gate.open_session(rollout(), 1)
            headers = {"Authorization": f"Bearer {session.outside.api_key}"}
            url = f"{session.outside.base_url}/chat/completions"
            durable_when_seen = []
            async with (
                aiohttp.ClientSession() as client,
                client.post(url, json={"messages": MESSAGES, "stream": True}, headers=headers) as response,
            ):
                async for line in response.content:
                    if b"tool_calls" in line:
                        durable_when_seen.append(len(list(read_journal(journal.path))))
            assert durable_when_seen
            assert set(durable_when_seen) == {1}

    run(scenario)


def test_agent_that_hangs_up_frees_the_server_and_leaves_its_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = Behaviour(
            name="slow", turns=(Turn(text="word " * 400, tools=(ToolCall(name="x", arguments=""),)),)
        )
        script = Script(prompt=PROMPT, behaviours=(slow,))
        async with (
            PolicyServer([script], token_latency_s=0.01) as server,
            gateway(tmp_path, server.base_url) as (gate, journal),
        ):
            session = gate.open_session(rollout(), 1)
            headers = {"Authorization": f"Bearer {session.outside.api_key}"}
            url = f"{session.outside.base_url}/chat/completions"
            async with aiohttp.ClientSession() as client:
                response = await client.post(
                    url, json={"messages": MESSAGES, "stream": True}, headers=headers
                )
                while b"word" not in await response.content.readline():
                    pass
                response.close()
            await until(lambda: len(session.calls) == 1)
            await session.close()
            (call,) = read_journal(journal.path, rollout_id=session.rollout_id, attempt=1)
            assert "went away" in str(call.call.error)
            sampled = call.tokens.sampled_ids.tolist()
            assert 0 < len(sampled) < len(server.sampled[0].sampled_ids)
            assert sampled == list(server.sampled[0].sampled_ids[: len(sampled)])
            assert np.isfinite(call.tokens.logprobs).all()

    run(scenario)


def test_closing_a_session_ends_its_calls_and_records_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        arrived = asyncio.Event()

        async def never(request: web.Request) -> web.StreamResponse:
            arrived.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with upside(never) as server, gateway(tmp_path, server.url) as (gate, journal):
            session: GatewaySession = gate.open_session(rollout(), 1)
            call = asyncio.ensure_future(post(session.outside))
            await arrived.wait()
            await session.close()
            await session.close()
            with pytest.raises(aiohttp.ClientError):
                await call
            assert [item.call.error is None for item in read_journal(journal.path)] == [False]
            assert len(session.calls) == 1

    run(scenario)


def test_reply_that_cannot_be_journalled_is_not_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with upside(says(REPLY)) as server, gateway(tmp_path, server.url) as (gate, journal):
            session = gate.open_session(rollout(), 1)
            await journal.close()
            status, answer = await post(session.outside)
            assert status == 500
            assert error_of(answer)["code"] == "not_recorded"
            assert str(journal.path) not in json.dumps(answer)
            assert isinstance(session.error, SpoolError)
            assert session.calls == []

    run(scenario)


def test_unset_key_variable_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCROLL_TEST_KEY", raising=False)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="HPCROLL_TEST_KEY"):
            async with gateway(tmp_path, api_key_env="HPCROLL_TEST_KEY"):
                pass

    run(scenario)


def test_upstream_key_is_sent_and_the_agents_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCROLL_TEST_KEY", "secret")
    seen: list[dict[str, str]] = []

    async def looks(request: web.Request) -> web.StreamResponse:
        seen.append(dict(request.headers))
        return web.json_response(REPLY)

    async def scenario() -> None:
        async with (
            upside(looks) as server,
            gateway(tmp_path, server.url, api_key_env="HPCROLL_TEST_KEY") as (gate, _),
        ):
            session = gate.open_session(rollout(5), 3)
            await post(session.outside)
            assert seen[0]["Authorization"] == "Bearer secret"
            assert seen[0]["X-Session-Id"] == f"{'0' * 16}/5.3"

    run(scenario)
