"""The contract of dialects as tests: subclass `DialectContract` and give it a client of your API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from hpcroll.config import ModelConfig
from hpcroll.contract import LogprobKind, RecordedCall, Rollout, RolloutRef, StopReason, Task
from hpcroll.gateway import Gateway, GatewaySession, Journal, ModelEndpoint, read_journal
from hpcroll.testing.harness_suite import until
from hpcroll.testing.policy_server import Behaviour, PolicyServer, Script, ToolCall, Turn
from hpcroll.testing.policy_server.faults import Fault, FaultKind
from hpcroll.trajectory import build

PROMPT = "Say hello to the naïve world of 日本."
CUT = 8
"""Tokens of a reply that is cut short."""


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call as a client saw it."""

    call_id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Heard:
    """A reply as a client saw it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    ending: str = ""
    """`stop`, `length` or `tool_calls`, whatever the API calls it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    pieces: int = 1
    """Pieces of text that it came in."""
    native: Any = None
    """What the client sends back as this turn of the conversation."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error as a client saw it."""

    status: int | None
    """None where a stream had begun and the API's errors carry none."""
    message: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: a conversation of user texts, replies, and lists of (call, result)."""

    turns: Sequence[str | Heard | Sequence[tuple[Called, str]]]
    stream: bool
    system: str = "You are helpful."
    tools: Sequence[str] = ("look", "write")
    """Names of tools with one text argument, `text`."""
    max_tokens: int = 500
    temperature: float = 0.5
    image: bool = False
    """Ask for what no text can hold."""


class DialectClient:
    """A client of one API. Sync and async clients of one library may share their code."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self.endpoint = endpoint
        self.root = endpoint.base_url.removesuffix("/v1")

    async def close(self) -> None:
        """Frees its connections."""
        raise NotImplementedError

    async def ask(self, asked: Asked) -> Heard | Refused:
        """Must not try again."""
        raise NotImplementedError

    async def count(self, asked: Asked) -> int | None:
        """Tokens of the prompt; None where the API has no such request."""
        raise NotImplementedError

    async def models(self) -> list[str]:
        """Names of the models that there are."""
        raise NotImplementedError


def says(*turns: Turn, **fields: Any) -> Script:
    """A script that says `turns` to `PROMPT`."""
    behaviour = Behaviour(name="says", turns=turns, **fields)
    return Script(prompt=PROMPT, behaviours=(behaviour,))


def calling(*texts: str, text: str = "", reasoning: str = "") -> Turn:
    """A reply that calls the tool `look` once for each of `texts`."""
    tools = tuple(ToolCall(name="look", arguments={"text": said}) for said in texts)
    return Turn(text=text, reasoning=reasoning, tools=tools)


@dataclass(slots=True)
class Bench:
    """A scripted server behind a gateway, and one session of it."""

    server: PolicyServer
    journal: Journal
    session: GatewaySession

    def calls(self) -> list[RecordedCall]:
        return self.session.calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
class DialectContract:
    """What every dialect does with the same replies, driven by a client of its API."""

    name: ClassVar[str]
    """The dialect's, as calls record it."""
    clients: ClassVar[Sequence[type[DialectClient]]]
    shows_reasoning: ClassVar[bool] = True
    """False where the API drops the model's thoughts."""

    def test_text_reasoning_and_calls_arrive_as_they_were_sampled(self, tmp_path: Path, stream: bool) -> None:
        turn = calling('é\n\t"quoted"', text="Grüße, 日本 👋🏽!", reasoning="First, think.")

        async def scenario(bench: Bench, client: DialectClient) -> None:
            heard = await _heard(client, Asked([PROMPT], stream))
            assert heard.text == turn.text
            assert heard.reasoning == (turn.reasoning if self.shows_reasoning else "")
            assert [(call.name, call.arguments) for call in heard.calls] == [
                ("look", {"text": 'é\n\t"quoted"'})
            ]
            assert heard.ending == "tool_calls"
            assert not stream or heard.pieces > 1
            (call,), (sampled,) = bench.calls(), bench.server.sampled
            assert call.call.dialect == self.name
            assert _reply(call)["content"] == turn.text
            assert tuple(call.tokens.sampled_ids.tolist()) == sampled.sampled_ids
            assert tuple(call.tokens.prompt_ids.tolist()) == sampled.prompt_ids
            assert np.array_equal(call.tokens.logprobs, np.asarray(sampled.logprobs, np.float32))
            assert call.call.logprob_kind is LogprobKind.RAW
            assert (heard.prompt_tokens, heard.completion_tokens) == (
                len(sampled.prompt_ids),
                len(sampled.sampled_ids),
            )
            assert call.call.sampling_asked.temperature == pytest.approx(0.5)
            assert call.call.sampling_effective.temperature == 1.0

        self.run(tmp_path, says(turn), scenario)

    def test_conversation_that_goes_on_is_one_sequence(self, tmp_path: Path, stream: bool) -> None:
        """Parallel calls, their results, and text: what comes back is what was sampled."""
        script = says(
            calling("one", "two", text="Two at once."),
            calling('{"a":  1,\n "b": "ü"}'),
            Turn(text="Done."),
        )

        async def scenario(bench: Bench, client: DialectClient) -> None:
            turns: list[Any] = [PROMPT]
            for _ in range(3):
                heard = await _heard(client, Asked(turns, stream))
                turns.append(heard)
                if heard.calls:
                    turns.append([(call, f"result of {call.arguments['text']}") for call in heard.calls])
            assert [call.call.error for call in bench.calls()] == [None] * 3
            assert heard.text == "Done."
            assert heard.ending == "stop"
            (added,) = bench.calls()[2].call.messages
            assert cast(dict[str, Any], added)["role"] == "tool"
            assert len(build(bench.calls()).segments) == 1

        self.run(tmp_path, script, scenario, template="tekken", remember=True, noncanonical=1.0)

    def test_reply_that_is_cut_short_says_so(self, tmp_path: Path, stream: bool) -> None:
        async def scenario(bench: Bench, client: DialectClient) -> None:
            heard = await _heard(client, Asked([PROMPT], stream, max_tokens=CUT))
            assert heard.ending == "length"
            assert heard.completion_tokens == CUT
            (call,) = bench.calls()
            assert call.call.sampling_asked.max_tokens == CUT
            assert call.call.finish_reason == "length"

        self.run(tmp_path, says(Turn(text="word " * 50)), scenario)

    def test_arguments_that_are_no_json_are_not_lost(self, tmp_path: Path, stream: bool) -> None:
        script = says(Turn(tools=(ToolCall(name="look", arguments='{"text": "unfinish'),)), Turn(text="Oh."))

        async def scenario(bench: Bench, client: DialectClient) -> None:
            heard = await _heard(client, Asked([PROMPT], stream))
            assert "unfinish" in json.dumps(heard.calls[0].arguments)
            reply = _reply(bench.calls()[0])
            assert reply["tool_calls"][0]["function"]["arguments"] == '{"text": "unfinish'
            turns: list[Any] = [PROMPT, heard, [(heard.calls[0], "these arguments are broken")]]
            assert (await _heard(client, Asked(turns, stream))).text == "Oh."

        self.run(tmp_path, script, scenario)

    def test_image_is_refused_by_name_and_reaches_no_server(self, tmp_path: Path, stream: bool) -> None:
        async def scenario(bench: Bench, client: DialectClient) -> None:
            refused = await _refused(client, Asked([PROMPT], stream, image=True))
            assert refused.status == 400
            assert "is not supported: hpcroll records text only" in refused.message
            assert bench.server.sampled == []
            assert bench.calls() == []

        self.run(tmp_path, says(Turn(text="Hm.")), scenario)

    def test_context_that_is_too_long_is_said_in_the_words_of_the_api(
        self, tmp_path: Path, stream: bool
    ) -> None:
        async def scenario(bench: Bench, client: DialectClient) -> None:
            refused = await _refused(client, Asked([PROMPT + " and more" * 1000], stream))
            assert refused.status == 400
            self.check_overflow(refused)
            assert bench.session.limit is StopReason.CONTEXT_LIMIT
            assert (await _heard(client, Asked([PROMPT], stream))).text == "Hm."
            assert bench.session.limit is None

        self.run(tmp_path, says(Turn(text="Hm.")), scenario, context_tokens=1200)

    def check_overflow(self, refused: Refused) -> None:
        """Your API's own way to say it, by which its agents know that they must compact."""
        raise NotImplementedError

    def test_spent_rollout_and_wrong_key_are_refused(self, tmp_path: Path, stream: bool) -> None:
        async def scenario(bench: Bench, client: DialectClient) -> None:
            await _heard(client, Asked([PROMPT], stream))
            refused = await _refused(client, Asked([PROMPT], stream))
            assert (refused.status, bench.session.limit) == (400, StopReason.TURN_LIMIT)
            await bench.session.close()
            refused = await _refused(client, Asked([PROMPT], stream))
            assert refused.status == 401
            assert "belongs to no open session" in refused.message

        self.run(tmp_path, says(Turn(text="Hm.")), scenario, max_calls=1)

    def test_server_that_dies_in_the_middle_is_an_error_and_its_tokens_are_kept(
        self, tmp_path: Path, stream: bool
    ) -> None:
        script = says(Turn(text="word " * 50, fault=Fault(kind=FaultKind.RESET, after_tokens=CUT)))

        async def scenario(bench: Bench, client: DialectClient) -> None:
            refused = await _refused(client, Asked([PROMPT], stream))
            assert refused.status in ((None, 502) if stream else (502,))
            assert refused.message
            (call,) = bench.calls()
            assert call.call.error
            if stream:
                assert 0 < len(call.tokens.sampled_ids) <= CUT
            assert [item.call for item in read_journal(bench.journal.path)] == [call.call]

        self.run(tmp_path, script, scenario)

    def test_tokens_of_a_prompt_can_be_counted(self, tmp_path: Path, stream: bool) -> None:
        async def scenario(bench: Bench, client: DialectClient) -> None:
            asked = Asked([PROMPT], stream, system="", tools=())
            await _heard(client, asked)
            true = bench.calls()[0].call.usage.prompt_counted
            counted = await client.count(asked)
            if counted is not None:
                assert counted == pytest.approx(true, rel=0.02)
            assert len(bench.calls()) == 1
            assert await client.models() == ["policy"]

        self.run(tmp_path, says(Turn(text="Hm.")), scenario)

    def test_agents_that_ask_at_once_are_told_apart(self, tmp_path: Path, stream: bool) -> None:
        async def scenario(bench: Bench, client: DialectClient) -> None:
            texts = [f"{PROMPT} Number {number}." for number in range(8)]
            await asyncio.gather(*(_heard(client, Asked([text], stream)) for text in texts))
            found = {cast(dict[str, Any], call.call.messages[-1])["content"] for call in bench.calls()}
            assert len(bench.calls()) == 8
            assert set(texts) <= found

        self.run(tmp_path, says(Turn(text="Hm.", stall_s=0.05)), scenario)

    def run(
        self,
        root: Path,
        script: Script,
        scenario: Callable[[Bench, DialectClient], Awaitable[None]],
        **options: Any,
    ) -> None:
        """Runs `scenario` once with every client."""

        async def every() -> None:
            for number, kind in enumerate(self.clients):
                folder = root / str(number)
                folder.mkdir()
                async with asyncio.timeout(120), bench_of(folder, script, **options) as bench:
                    client = kind(bench.session.outside)
                    try:
                        await scenario(bench, client)
                    finally:
                        await client.close()

        asyncio.run(every())


@asynccontextmanager
async def bench_of(
    root: Path,
    script: Script,
    *,
    template: str = "qwen3",
    remember: bool = False,
    noncanonical: float = 0.5,
    context_tokens: int = 32_768,
    max_calls: int | None = None,
) -> AsyncIterator[Bench]:
    """A scripted server behind a gateway with one session."""
    server = PolicyServer(
        [script],
        template=template,
        remember=remember,
        noncanonical=noncanonical,
        context_tokens=context_tokens,
    )
    async with server:
        journal = Journal(root / "journal")
        journal.open()
        gateway = Gateway(ModelConfig(endpoints=(server.base_url,), call_tries=1), journal=journal)
        await gateway.start()
        task = Task(task_id="t", handler="command", prompt=PROMPT)
        rollout = Rollout(
            ref=RolloutRef(segment="0" * 16, ordinal=0), task=task, sample_index=0, group_size=1
        )
        try:
            session = gateway.open_session(rollout, 1, max_calls=max_calls)
            yield Bench(server, journal, session)
        finally:
            await gateway.close()
            await journal.close()
            await until(lambda: server.waiting == 0)


async def _heard(client: DialectClient, asked: Asked) -> Heard:
    answer = await client.ask(asked)
    assert isinstance(answer, Heard), answer
    return answer


async def _refused(client: DialectClient, asked: Asked) -> Refused:
    answer = await client.ask(asked)
    assert isinstance(answer, Refused), answer
    return answer


def _reply(call: RecordedCall) -> dict[str, Any]:
    return cast(dict[str, Any], call.call.reply)
