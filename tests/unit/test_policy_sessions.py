"""The scripted policy server keeps to its script whatever agents do to their history."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from hpcroll.testing.policy_server import Aside, Fault, FaultKind, PolicyServer, Turn
from hpcroll.testing.policy_server.script import ASIDE_TEXT, COMPACTION_PROMPTS
from tests.policy_client import BASH, PROMPT, WIRES, ask, bash, run, script, user

THREE = (Turn(text="One.", tools=(bash("ls"),)), Turn(text="Two.", tools=(bash("pwd"),)), Turn(text="Done."))


def seen(server: PolicyServer) -> list[tuple[int, str]]:
    return [(sampled.turn, sampled.kind) for sampled in server.sampled]


@pytest.mark.parametrize("template", ["tekken", "qwen3"])
@pytest.mark.parametrize("wire", WIRES)
def test_new_request_gets_the_next_turn_and_a_repeated_one_its_own_again(wire: str, template: str) -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)], template=template) as server:
            for history in ("a", "b", "b", "a", "c", "d"):
                await ask(server, [user(PROMPT), user(history)], wire=wire, tools=[BASH])
            assert seen(server) == [(index, "main") for index in (0, 1, 1, 0, 2, 3)]

    run(scenario)


@pytest.mark.parametrize("template", ["tekken", "qwen3"])
@pytest.mark.parametrize("wire", WIRES)
def test_request_that_does_not_offer_the_tool_is_answered_aside_and_advances_nothing(
    wire: str, template: str
) -> None:
    async def scenario() -> None:
        other = {"type": "function", "function": {"name": "web_search", "parameters": {}}}
        async with PolicyServer([script(*THREE, aside="A title.")], template=template) as server:
            for tools in (None, [BASH], [other], [BASH, other]):
                await ask(server, [user(PROMPT), user(str(tools))], wire=wire, tools=tools)
            assert seen(server) == [(0, "side"), (0, "main"), (1, "side"), (1, "main")]
            side, main, *_ = server.sampled
            shown = [b"".join(map(server.template.vocabulary.piece, s.sampled_ids)) for s in (side, main)]
            assert [b"A title." in text for text in shown] == [True, False]

    run(scenario)


def test_last_turn_without_tools_is_a_side_call_only_where_no_tools_are_offered() -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)]) as server:
            for history in ("a", "b"):
                await ask(server, [user(PROMPT), user(history)], tools=[BASH])
            await ask(server, [user(PROMPT), user("title?")])
            reply = await ask(server, [user(PROMPT), user("c")], tools=[BASH])
            assert seen(server)[2:] == [(2, "side"), (2, "main")]
            assert reply["choices"][0]["message"]["content"] == "Done."

    run(scenario)


def test_agent_without_tools_is_played_through() -> None:
    async def scenario() -> None:
        async with PolicyServer([script(Turn(text="One."), Turn(text="Two."))]) as server:
            for history in ("a", "b"):
                await ask(server, [user(PROMPT), user(history)])
            assert seen(server) == [(0, "main"), (1, "main")]

    run(scenario)


@pytest.mark.parametrize("template", ["tekken", "qwen3"])
def test_history_without_the_tasks_words_goes_on_with_the_sessions_script(template: str) -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)], template=template) as server:
            await ask(server, [user(PROMPT)], tools=[BASH])
            await ask(server, [user("Summary: files are to be counted."), user("Go on.")], tools=[BASH])
            await ask(server, [user("Go on.")], tools=[BASH], session="r/1.1")
            assert [s.behaviour for s in server.sampled] == ["agent", "agent", "unknown_task"]
            assert seen(server) == [(0, "main"), (1, "main"), (0, "side")]

    run(scenario)


@pytest.mark.parametrize("template", ["tekken", "qwen3"])
@pytest.mark.parametrize("words", COMPACTION_PROMPTS)
def test_request_for_a_summary_is_a_side_call_although_it_offers_tools(words: str, template: str) -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)], template=template) as server:
            await ask(server, [user(PROMPT)], tools=[BASH])
            reminder = {"role": "system", "content": "There are agents."}
            summary = await ask(server, [user(PROMPT), user(f"Now {words}!"), reminder], tools=[BASH])
            # The words stay in the history; only where they end it do they ask for a summary.
            await ask(server, [user(PROMPT), user(f"Now {words}!"), user("Go on.")], tools=[BASH])
            assert seen(server) == [(0, "main"), (1, "side"), (1, "main")]
            assert summary["choices"][0]["message"]["content"] == ASIDE_TEXT

    run(scenario)


def test_prompt_that_comes_back_after_a_compaction_gets_the_next_turn() -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)], context_tokens=4000) as server:
            await ask(server, [user(PROMPT)], tools=[BASH])
            with pytest.raises(aiohttp.ClientResponseError):
                await ask(server, [user(PROMPT), user("x y " * 4000)], tools=[BASH])
            await ask(server, [user(PROMPT)], tools=[BASH])
            await ask(server, [user(PROMPT), user(f"Now {COMPACTION_PROMPTS[0]}!")])
            await ask(server, [user(PROMPT)], tools=[BASH])
            assert seen(server) == [(0, "main"), (1, "main"), (2, "side"), (2, "main")]

    run(scenario)


def test_asides_of_a_behaviour_answer_each_kind_of_side_call_in_its_own_words() -> None:
    async def scenario() -> None:
        asides = (Aside(contains="title", text='{"title": "Files"}'), Aside(contains="topic", text="no"))
        async with PolicyServer([script(*THREE, asides=asides)]) as server:
            answers = [
                (await ask(server, [user(PROMPT), user(words)]))["choices"][0]["message"]["content"]
                for words in ("a title please", "a new topic?", "anything else?")
            ]
            assert answers == ['{"title": "Files"}', "no", ASIDE_TEXT]

    run(scenario)


def test_script_is_found_behind_what_an_agent_says_of_its_environment() -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)]) as server:
            messages: list[Any] = [user("<environment>linux</environment>"), user(f"Task: {PROMPT}")]
            await ask(server, messages, tools=[BASH])
            assert server.sampled[0].behaviour == "agent"

    run(scenario)


def test_sub_agent_with_a_script_of_its_own_leaves_the_main_agents_count() -> None:
    async def scenario() -> None:
        inner = script(Turn(text="In.", tools=(bash("id"),)), prompt="Look into the cellar.", name="inner")
        async with PolicyServer([script(*THREE), inner]) as server:
            for words in (PROMPT, "Look into the cellar.", "Look into the cellar. Again.", f"{PROMPT} Now."):
                await ask(server, [user(words)], tools=[BASH])
            assert [(s.behaviour, s.turn) for s in server.sampled] == [
                ("agent", 0),
                ("inner", 0),
                ("inner", 1),
                ("agent", 1),
            ]

    run(scenario)


def test_sessions_do_not_count_for_each_other() -> None:
    async def scenario() -> None:
        async with PolicyServer([script(*THREE)]) as server:
            for session in ("r/0.1", "r/1.1", "r/0.2", "r/0.1"):
                messages = [user(PROMPT), user(str(len(server.sampled)))]
                await ask(server, messages, tools=[BASH], session=session)
            assert [s.turn for s in server.sampled] == [0, 0, 0, 1]

    run(scenario)


def test_turn_that_did_not_reach_its_client_is_given_to_the_next_request() -> None:
    async def scenario() -> None:
        broken = Turn(text="One.", tools=(bash("ls"),), fault=Fault(kind=FaultKind.RESET, after_tokens=2))
        async with PolicyServer([script(broken, *THREE[1:])]) as server:
            with pytest.raises(aiohttp.ClientError):
                await ask(server, [user(PROMPT)], tools=[BASH], stream=True)
            await ask(server, [user(PROMPT), user("again")], tools=[BASH], stream=True)
            await ask(server, [user(PROMPT), user("more")], tools=[BASH], stream=True)
            assert seen(server) == [(0, "main"), (0, "main"), (1, "main")]

    run(scenario)
