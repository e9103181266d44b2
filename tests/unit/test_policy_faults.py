"""The scripted policy server fails as asked, and its log says how far each reply got."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcroll.testing.harness_suite import until
from hpcroll.testing.policy_server import Fault, FaultKind, PolicyServer, Turn
from tests.policy_client import (
    BASH,
    PATHS,
    PROMPT,
    WIRES,
    ask,
    bash,
    request_body,
    run,
    script,
    tokens_of,
    user,
)

NUMBER = re.compile(r"-\d\.\d+")
"""A log-probability."""
TURN = Turn(text="I look at it in many words.", tools=(bash("ls"),))


def server_with(fault: Fault | None = None, **options: Any) -> PolicyServer:
    turn = TURN if fault is None else TURN.model_copy(update={"fault": fault})
    return PolicyServer([script(turn, Turn(text="Done."))], **options)


async def question(server: PolicyServer, wire: str = "chat", *, stream: bool = False) -> list[Any]:
    answer = await ask(server, [user(PROMPT)], wire=wire, tools=[BASH], stream=stream)
    return answer if stream else [answer]


async def question_until_broken(server: PolicyServer, wire: str) -> tuple[list[Any], Exception | None]:
    """The events that came, and what ended the connection."""
    body = {**request_body(server, wire, [user(PROMPT)], tools=[BASH]), "stream": True}
    events: list[Any] = []
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.post(server.base_url + PATHS[wire], json=body) as response,
        ):
            async for line in response.content:
                events += [json.loads(line[6:])] if line.startswith(b"data: {") else []
    except aiohttp.ClientError as error:
        return events, error
    return events, None


@pytest.mark.parametrize("after_tokens", [0, 1, 5])
@pytest.mark.parametrize("wire", WIRES)
def test_stream_is_reset_after_as_many_ids_as_the_log_says(wire: str, after_tokens: int) -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=FaultKind.RESET, after_tokens=after_tokens)) as server:
            events, error = await question_until_broken(server, wire)
            assert isinstance(error, aiohttp.ClientError)
            (sampled,) = server.sampled
            ids, logprobs = tokens_of(wire, events)
            assert ids == list(sampled.sampled_ids[: sampled.sent])
            assert logprobs == list(sampled.logprobs[: sampled.sent])
            assert sampled.sent == after_tokens < len(sampled.sampled_ids)
            assert (sampled.ended, sampled.fault) == ("fault", "reset")

    run(scenario)


def test_whole_reply_is_reset_before_its_first_byte_and_the_next_try_is_well() -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=FaultKind.RESET, times=2)) as server:
            for _ in range(2):
                with pytest.raises(aiohttp.ClientError):
                    await question(server)
            await question(server)
            assert [(s.ended, s.sent > 0, s.turn) for s in server.sampled] == [
                ("fault", False, 0),
                ("fault", False, 0),
                ("done", True, 0),
            ]

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_error_status_samples_nothing_and_advances_nothing(stream: bool) -> None:
    async def scenario() -> None:
        for status in (429, 500, 503):
            fault = Fault(kind=FaultKind.STATUS, status=status, retry_after_s=0.25)
            async with server_with(fault) as server:
                with pytest.raises(aiohttp.ClientResponseError) as caught:
                    await question(server, stream=stream)
                assert caught.value.status == status
                assert caught.value.headers is not None
                assert caught.value.headers["Retry-After"] == "0.25"
                assert server.sampled == []
                await question(server, stream=stream)
                assert [sampled.turn for sampled in server.sampled] == [0]

    run(scenario)


@pytest.mark.parametrize("kind", [FaultKind.GARBAGE, FaultKind.HTML, FaultKind.TRUNCATED])
def test_answer_that_is_no_json_comes_with_status_200(kind: FaultKind) -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=kind)) as server:
            with pytest.raises(ValueError, match=r"Expecting value|codec"):
                await question(server)
            assert [(s.ended, s.sent) for s in server.sampled] == (
                [("fault", 0)] if kind is FaultKind.TRUNCATED else []
            )
            assert (await question(server))[0]["choices"]

    run(scenario)


def test_stream_may_end_in_the_middle_of_an_event() -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=FaultKind.TRUNCATED, after_tokens=3)) as server:
            body = {**request_body(server, "chat", [user(PROMPT)], tools=[BASH]), "stream": True}
            url = f"{server.base_url}/v1/chat/completions"
            async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
                lines = [line for line in (await response.text()).splitlines() if line]
            with pytest.raises(ValueError, match=r"Unterminated|delimiter|Expecting"):
                json.loads(lines[-1].removeprefix("data: "))
            assert len(lines) == 1 + 3 + 1
            assert [(s.ended, s.sent, s.fault) for s in server.sampled] == [("fault", 3, "truncated")]

    run(scenario)


@pytest.mark.parametrize(
    "kind", [kind for kind in FaultKind if kind.value.startswith(("no_", "nan_", "wrong_"))]
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_numbers_are_missing_or_wrong_on_demand_and_right_in_the_log(
    wire: str, stream: bool, kind: FaultKind
) -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=kind)) as server:
            answers = await question(server, wire, stream=stream)
            text = json.dumps(answers)
            (sampled,) = server.sampled
            assert (sampled.ended, sampled.fault) == ("done", kind.value)
            assert all(math.isfinite(value) for value in sampled.logprobs)
            said = {
                FaultKind.NO_LOGPROBS: "NaN" not in text and not NUMBER.search(text),
                FaultKind.NAN_LOGPROBS: "NaN" in text and not NUMBER.search(text),
                FaultKind.NO_TOKEN_IDS: not re.search(r'_ids": \[\d|, \d+, null]', text),
                FaultKind.WRONG_USAGE: f'"completion_tokens": {len(sampled.sampled_ids) + 7}' in text,
            }
            assert said.pop(kind)
            assert not any(said.values())

    run(scenario)


@pytest.mark.parametrize("wire", WIRES)
def test_version_changes_in_the_middle_of_a_stream(wire: str) -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=FaultKind.VERSION, after_tokens=4), version=7) as server:
            events = await question(server, wire, stream=True)
            found = [
                str(event.get("weight_version") or event.get("meta_info", {}).get("weight_version"))
                for event in events
            ]
            assert sorted(set(found)) == ["7", "8"]
            assert found == sorted(found)
            (sampled,) = server.sampled
            assert (sampled.version, sampled.version_end) == (7, 8)

    run(scenario)


def test_client_that_leaves_a_stalled_stream_is_logged_with_the_ids_it_had() -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=FaultKind.STALL, after_tokens=3)) as server:
            waiting = asyncio.ensure_future(question(server, stream=True))
            await until(lambda: bool(server.sampled))
            assert server.sampled[0].ended == ""
            waiting.cancel()
            await until(lambda: server.sampled[0].ended != "")
            assert (server.sampled[0].ended, server.sampled[0].fault) == ("client_gone", "stall")
            assert server.sampled[0].sent <= 3

    run(scenario)


def test_client_that_leaves_before_a_whole_reply_is_logged_with_no_ids() -> None:
    async def scenario() -> None:
        async with server_with(token_latency_s=3600.0) as server:
            waiting = asyncio.ensure_future(question(server))
            await until(lambda: bool(server.sampled))
            waiting.cancel()
            await until(lambda: server.sampled[0].ended != "")
            assert (server.sampled[0].ended, server.sampled[0].sent) == ("client_gone", 0)

    run(scenario)


def test_stall_is_over_after_its_time() -> None:
    async def scenario() -> None:
        async with server_with(Fault(kind=FaultKind.STALL, after_tokens=3, stall_s=0.01)) as server:
            await question(server, stream=True)
            assert [sampled.ended for sampled in server.sampled] == ["done"]

    run(scenario)


def test_fault_is_ordered_over_http_for_one_session() -> None:
    async def scenario() -> None:
        async with server_with() as server, aiohttp.ClientSession() as client:
            order = {"kind": "status", "status": 503, "times": 2, "session": "r/7.1"}
            async with client.post(f"{server.base_url}/scripted/fault", json=order) as response:
                assert await response.json() == {"waiting": 2}
            async with client.post(f"{server.base_url}/scripted/fault", json={"kind": "x"}) as response:
                assert response.status == 400
            await question(server)
            for _ in range(2):
                with pytest.raises(aiohttp.ClientResponseError):
                    await ask(server, [user(PROMPT)], session="r/7.1")
            await ask(server, [user(PROMPT)], session="r/7.1")
            assert [sampled.session for sampled in server.sampled] == ["r/0.1", "r/7.1"]

    run(scenario)


def test_log_file_holds_each_reply_once_and_as_it_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "log.jsonl"
        async with server_with(log_path=path) as server:
            server.fail(Fault(kind=FaultKind.RESET, after_tokens=2))
            with pytest.raises(aiohttp.ClientError):
                await question(server, stream=True)
            await question(server, stream=True)
            await question(server, "sglang_generate")
            await until(lambda: len(path.read_text().splitlines()) == 3)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert [(line["ended"], line["wire"]) for line in lines] == [
                ("fault", "chat"),
                ("done", "chat"),
                ("done", "sglang_generate"),
            ]
            assert lines[0]["sent"] == 2
            assert all(len(line["logprobs"]) == len(line["sampled_ids"]) for line in lines)

    run(scenario)
