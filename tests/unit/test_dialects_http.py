"""At the socket: bodies that are no requests, record before reply, agents that go away or come twice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcroll.config import ModelConfig
from hpcroll.contract import Rollout, RolloutRef, Task
from hpcroll.gateway import Gateway, GatewaySession, Journal, read_journal
from hpcroll.gateway.dialects.openai_chat import OpenAIChat
from hpcroll.testing.harness_suite import until
from hpcroll.testing.policy_server import Behaviour, PolicyServer, Script, ToolCall, Turn
from hpcroll.testing.policy_server.faults import Fault, FaultKind
from hpcroll.trajectory import build

PROMPT = "Say hello to the naïve world of 日本."
TURN = Turn(
    text="Two words.",
    reasoning="Hm, so.",
    tools=tuple(ToolCall(name="look", arguments={"text": text}) for text in ("alpha", "beta")),
)
ENDS = (
    b"[DONE]",
    b'finish_reason":"',
    b'stop_reason":"',
    b"message_stop",
    b'"status":"completed"',
    b"finishReason",
)
"""The end of a reply, in JSON without spaces."""
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/v1beta/models/m:streamGenerateContent?alt=sse",
}
every_api = pytest.mark.parametrize("api", PATHS)


def body(api: str, *, stream: bool = True) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    messages = [{"role": "user", "content": PROMPT}]
    if api == "chat":
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        return {"messages": messages, "stream": stream, "tools": [tool]}
    if api == "responses":
        tool = {"type": "function", "name": "look", "parameters": schema}
        return {"input": PROMPT, "stream": stream, "tools": [tool]}
    if api == "messages":
        return {"messages": messages, "stream": stream, "tools": [{"name": "look", "input_schema": schema}]}
    declared = {"functionDeclarations": [{"name": "look", "parametersJsonSchema": schema}]}
    return {"contents": [{"role": "user", "parts": [{"text": PROMPT}]}], "tools": [declared]}


def path(api: str, *, stream: bool = True) -> str:
    return PATHS[api] if stream else PATHS[api].replace("streamGenerateContent?alt=sse", "generateContent")


class HeldJournal(Journal):
    """Its writes wait until `released`; `reached` tells that one does."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.reached = threading.Event()
        self.released = threading.Event()

    def _write(self, batch: Any, compressor: Any) -> None:
        self.reached.set()
        assert self.released.wait(60)
        super()._write(batch, compressor)


class Place:
    """A scripted server behind a gateway with one session, and a client."""

    def __init__(
        self, server: PolicyServer, gate: Gateway, session: GatewaySession, client: aiohttp.ClientSession
    ) -> None:
        self.server = server
        self.gate = gate
        self.session = session
        self.client = client
        self.root = session.outside.base_url.removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {session.outside.api_key}"}

    def post(self, where: str, **fields: Any) -> Any:
        return self.client.post(self.root + where, headers=self.headers, **fields)


@asynccontextmanager
async def place(
    root: Path, *turns: Turn, journal: Journal | None = None, **options: Any
) -> AsyncIterator[Place]:
    behaviour = Behaviour(name="says", turns=turns or (TURN,), count="requests")
    script = Script(prompt="", behaviours=(behaviour,))
    journal = journal or Journal(root / "journal")
    journal.open()
    async with PolicyServer([script], template="qwen3", noncanonical=0.0, **options) as server:
        gate = Gateway(ModelConfig(endpoints=(server.base_url,), call_tries=1), journal=journal)
        await gate.start()
        task = Task(task_id="t", handler="command", prompt=PROMPT)
        ref = RolloutRef(segment="0" * 16, ordinal=0)
        session = gate.open_session(Rollout(ref=ref, task=task, sample_index=0, group_size=1), 1)
        try:
            async with aiohttp.ClientSession() as client:
                yield Place(server, gate, session, client)
        finally:
            await gate.close()
            await journal.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(within())


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def message_of(answer: Any) -> str:
    """The message of an error in the shape of any API."""
    return str(answer["error"]["message"])


@every_api
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b'"text"',
        b"[1]",
        b"null",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a": "\\ud800", "b": ' + b"[" * 100_000,
        b"{}",
    ],
    ids=["empty", "cut", "text", "list", "null", "nan", "latin", "deep", "surrogate", "nothing"],
)
def test_body_that_is_no_request_is_refused_in_the_shape_of_the_api(
    tmp_path: Path, api: str, data: bytes
) -> None:
    async def scenario() -> None:
        async with place(tmp_path) as here:
            async with here.post(path(api), data=data) as response:
                assert response.status == 400
                assert message_of(await response.json())
            assert here.session.calls == []
            assert here.server.sampled == []

    run(scenario)


@every_api
def test_unknown_addresses_and_methods_are_refused_in_the_shape_of_the_api(tmp_path: Path, api: str) -> None:
    async def scenario() -> None:
        async with place(tmp_path) as here:
            address = here.root + path(api)
            async with here.client.put(address, headers=here.headers) as response:
                assert response.status == 405
                assert "Method Not Allowed" in message_of(await response.json())
            unknown = {"generate": "/v1beta/models/m:embedContent"}.get(api, f"{path(api)}/unknown")
            async with here.post(unknown, json={}) as response:
                assert response.status == (405 if api == "generate" else 404)
                answer = await response.json()
            shape = {"messages": {"type", "error"}}.get(api, {"error"})
            assert set(answer) == shape
            assert isinstance(answer["error"]["code"], int if api == "generate" else str)
            async with here.client.options(address, headers=here.headers) as response:
                assert response.status == 405
            async with here.client.head(here.root + "/") as response:
                assert response.status == 200

    run(scenario)


@every_api
def test_half_of_a_surrogate_pair_is_the_replacement_character(tmp_path: Path, api: str) -> None:
    """JavaScript agents cut long texts between the halves of an emoji."""

    async def scenario() -> None:
        async with place(tmp_path, Turn(text="ok")) as here:
            text = json.dumps(body(api)).replace("Say hello", "Say \\ud83d hello \\ud83d\\ude00 \\u0000")
            headers = {"Content-Type": "text/plain", "Expect": "100-continue"}
            address = here.root + path(api)
            async with here.client.post(address, data=text, headers={**here.headers, **headers}) as response:
                assert response.status == 200
                await response.read()
            (call,) = here.session.calls
            assert "Say \ufffd hello 😀 \0" in json.dumps(call.call.messages, ensure_ascii=False).replace(
                "\\u0000", "\0"
            )

    run(scenario)


@every_api
def test_body_in_an_encoding_that_it_is_not_is_refused(tmp_path: Path, api: str) -> None:
    async def scenario() -> None:
        async with place(tmp_path) as here:
            headers = {**here.headers, "Content-Encoding": "gzip", "X-Metadata": "x" * 20_000}
            async with here.client.post(here.root + path(api), data=b"{}", headers=headers) as response:
                assert response.status == 400
                assert "cannot be decoded" in message_of(await response.json())

    run(scenario)


def test_ten_megabytes_are_counted_and_a_broken_dialect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with place(tmp_path) as here:
            long = json.dumps({"messages": [{"role": "user", "content": "word " * 2_000_000}]}).encode()
            async with here.post("/v1/messages/count_tokens", data=io.BytesIO(long)) as response:
                assert (await response.json())["input_tokens"] > 2_000_000
            monkeypatch.setattr(OpenAIChat, "read", lambda *_: 1 / 0)
            async with here.post(path("chat"), json=body("chat")) as response:
                assert response.status == 400
                assert "dialect openai_chat: ZeroDivisionError" in message_of(await response.json())

    run(scenario)


@every_api
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_nothing_to_act_upon_is_shown_before_the_call_is_durable(
    tmp_path: Path, api: str, stream: bool
) -> None:
    async def scenario() -> None:
        journal = HeldJournal(tmp_path / "journal")
        async with place(tmp_path, journal=journal) as here:
            shown = bytearray()

            async def ask() -> None:
                asked = here.post(path(api, stream=stream), json=body(api, stream=stream))
                async with asked as response:
                    async for chunk in response.content.iter_any():
                        shown.extend(chunk)

            asking = asyncio.create_task(ask())
            try:
                await until(journal.reached.is_set)
                assert list(read_journal(journal.path)) == []
                # The gateway and this client share a loop: other requests come after what was sent before.
                for _ in range(3):
                    async with here.client.get(here.root + "/") as response:
                        await response.read()
                before = shown.replace(b" ", b"")
                assert not asking.done()
            finally:
                journal.released.set()
            await asking
            assert (b'"."' in before) is stream
            assert [end for end in ENDS if end in before] == []
            after = shown.replace(b" ", b"")
            assert any(end in after for end in ENDS)
            # The opening events of Responses name the tools that there are.
            assert before.count(b"look") == (2 if stream and api == "responses" else 0)
            assert after.count(b"look") >= before.count(b"look") + 2
            assert len(list(read_journal(journal.path))) == 1

    run(scenario)


@every_api
def test_agent_that_goes_away_at_any_event_leaves_a_record_and_nothing_else(tmp_path: Path, api: str) -> None:
    async def scenario() -> None:
        async with place(tmp_path, token_latency_s=0.001) as here:
            async with here.post(path(api), json=body(api)) as response:
                events = (await response.read()).count(b"\n\n") or 12
            await until(lambda: here.server.waiting == 0)
            tasks, files = len(asyncio.all_tasks()), open_files()
            for number in range(events + 1):
                async with aiohttp.ClientSession() as client:
                    asked = client.post(here.root + path(api), json=body(api), headers=here.headers)
                    async with asked as response:
                        seen = 0
                        while seen < number and (line := await response.content.readline()):
                            seen += line in (b"\n", b"\r\n")
                        response.close()
                await until(lambda done=number + 2: len(here.session.calls) == done)
                await until(lambda: here.server.waiting == 0)
            assert {call.call.error for call in here.session.calls} <= {
                None,
                "the agent went away before the reply was complete",
            }
            assert here.session.calls[1].call.error is not None
            assert here.session.calls[-1].call.error is None
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
            await until(lambda: open_files() <= files + 1)
            pool = here.session.services.pool
            assert pool._balance.calls(here.server.base_url.removesuffix("/v1")) == 0
            assert pool._flights == set()
            assert here.session._in_flight == set()

        assert len(list(read_journal(tmp_path / "journal"))) == events + 2

    run(scenario)


@every_api
def test_same_prompt_twice_at_once_is_two_samples_one_of_them_a_retry(tmp_path: Path, api: str) -> None:
    async def scenario() -> None:
        turns = (Turn(text="One."), Turn(text="Two."))
        async with place(tmp_path, *turns, token_latency_s=0.005) as here:

            async def ask() -> bytes:
                async with here.post(path(api), json=body(api)) as response:
                    assert response.status == 200
                    return bytes(await response.read())

            answers = await asyncio.gather(ask(), ask())
            assert answers[0] != answers[1]
            first, second = here.session.calls
            assert (first.call.error, second.call.error) == (None, None)
            assert first.tokens.prompt_length == second.tokens.prompt_length
            built = build(here.session.calls)
            assert sorted(segment.began for segment in built.segments) == ["retry", "start"]

    run(scenario)


@every_api
def test_retry_of_a_stream_that_broke_holds_the_line_and_the_broken_one_is_kept(
    tmp_path: Path, api: str
) -> None:
    async def scenario() -> None:
        broken = Turn(text="word " * 20, fault=Fault(kind=FaultKind.RESET, after_tokens=6))
        async with place(tmp_path, broken) as here:
            with contextlib.suppress(aiohttp.ClientError):
                async with here.post(path(api), json=body(api)) as response:
                    answer = await response.read()
                    assert b"upstream_failed" in answer or b"broke off" in answer
            async with here.post(path(api), json=body(api)) as response:
                assert response.status == 200
                await response.read()
            first, second = here.session.calls
            assert first.call.error
            assert 0 < len(first.tokens.sampled_ids) <= 6
            assert second.call.error is None
            built = build(here.session.calls)
            began = {span.call_index: built.segments[span.segment_index].began for span in built.call_spans}
            assert began == {0: "retry", 1: "start"}

    run(scenario)
