"""What an agent sends back decides the next prompt: exact continuation where it is what was given."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.gateway.tokens import (
    CannotRenderError,
    Finished,
    How,
    Rendered,
    TokenConversation,
    TokenRenderer,
    Why,
)
from tests.token_families import FAMILIES, TOOLS, family, resplit, samples

seeded = settings(derandomize=True, deadline=None, max_examples=60)
Message = dict[str, Any]
START: list[Message] = [
    {"role": "system", "content": "You are an agent; <|im_end|> is text."},
    {"role": "user", "content": "Count the files."},
]
ALL = "all"


class Session:
    """An agent and its model: replies are what a template would write, tokenised at random."""

    def __init__(self, renderer: TokenRenderer, seed: int = 0) -> None:
        self.renderer = renderer
        self.conversation = TokenConversation(renderer)
        self.random = Random(seed)
        self.calls: list[tuple[Rendered, Finished]] = []

    def ask(
        self,
        messages: Sequence[Message],
        *,
        calls: int = 1,
        tools: Sequence[Any] = TOOLS,
        thought: str = "Hm.",
        said: str = "I look.",
        cut: bool = False,
    ) -> tuple[Rendered, Message]:
        """One call; the reply is said, thought and calls tools as told; `cut`: a limit ends it early."""
        rendered = self.conversation.prompt(messages, tools, call_index=len(self.calls))
        reply: Message = {
            "role": "assistant",
            "content": said,
            "reasoning_content": thought,
            "tool_calls": [
                {
                    "id": f"x{number}",
                    "type": "function",
                    "function": {"name": "bash", "arguments": {"command": f"ls {number}", "count": 1}},
                }
                for number in range(calls)
            ],
        }
        ids = sampled_of(self.renderer, reply)
        ids = resplit(self.renderer, ids[: len(ids) // 2] if cut else ids, self.random)
        return rendered, self.answer(rendered, ids, tools)

    def answer(self, rendered: Rendered, ids: list[int], tools: Sequence[Any] = TOOLS) -> Message:
        """`ids` are sampled: the message that the agent gets."""
        stream = self.conversation.stream(rendered, tools)
        stream.feed(ids)
        finished = stream.finish()
        self.conversation.reply(rendered, finished)
        self.calls.append((rendered, finished))
        return finished.message

    def sequence(self, call: int) -> list[int]:
        """Prompt and sample of a call."""
        rendered, finished = self.calls[call]
        return [*rendered.ids.tolist(), *finished.ids]


def sampled_of(renderer: TokenRenderer, reply: Message) -> list[int]:
    """A reply as the template writes it, from where the prompt ends to the end of the turn."""
    prompt = renderer.render([START[1]])
    whole = renderer.render([START[1], reply, {"role": "tool", "tool_call_id": "x0", "content": "r"}])
    start = min(
        next((at for at, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), 10**9),
        len(prompt),
    )
    end = next(at for at in range(start, len(whole)) if whole[at] in renderer.stop_ids)
    return whole[start : end + 1]


def sent_back(message: Message) -> Message:
    """What most agents return of a reply: without its thinking."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def results(message: Message, text: str = "a.txt") -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{text} {number}"}
        for number, call in enumerate(message.get("tool_calls", ()))
    ]


def continues(prompt: Rendered, sequence: list[int]) -> bool:
    return prompt.ids[: len(sequence)].tolist() == sequence and len(prompt.ids) > len(sequence)


def text_of(renderer: TokenRenderer, ids: Sequence[int]) -> str:
    """A prompt's text without thinking; control tokens are told from text that spells them."""
    control = renderer.tokenizer.control_ids
    runs: list[str] = []
    plain: list[int] = []
    for token in [*ids, None]:
        if token is None or token in control:
            runs.append(renderer.tokenizer.decode(plain))
            plain = []
            if token is not None:
                runs.append(f"\x00{renderer.tokenizer.decode([token])}\x01")
        else:
            plain.append(token)
    return re.sub(r"\x00<think>\x01.*?\x00</think>\x01\n*", "", "".join(runs), flags=re.DOTALL)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5", "glm-5", "nemotron-3"])
@pytest.mark.parametrize("keeps_thinking", [True, False])
def test_an_append_only_agent_extends_every_prompt_and_sample(name: str, keeps_thinking: bool) -> None:
    session = Session(family(name, ALL))
    messages = list(START)
    for turn in range(12):
        prompt, reply = session.ask(messages, calls=turn % 3)
        if turn:
            assert (prompt.how, prompt.from_call) == (How.BRIDGED, turn - 1)
            assert continues(prompt, session.sequence(turn - 1))
        else:
            assert (prompt.how, prompt.why) == (How.RENDERED, Why.START)
        messages += [reply if keeps_thinking else sent_back(reply), *results(reply)]
        if not turn % 3:
            messages.append({"role": "user", "content": f"And {turn}?"})


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5"])
def test_thinking_of_a_tool_cycle_ends_with_the_next_user_message(name: str) -> None:
    session = Session(family(name))
    assert session.renderer.thinking_retention == "tool_cycle"
    _, first = session.ask(START)
    messages = [*START, sent_back(first), *results(first)]
    within, second = session.ask(messages, calls=0)
    assert within.how is How.BRIDGED
    messages += [sent_back(second), {"role": "user", "content": "And now?"}]
    after, _ = session.ask(messages)
    assert (after.how, after.why) == (How.RENDERED, Why.THINKING_DROPPED)
    assert "Hm." not in session.renderer.tokenizer.decode(after.ids.tolist())


@pytest.mark.parametrize("name", ["llama-3"])
def test_a_family_whose_calls_are_plain_text_is_extended_too(name: str) -> None:
    session = Session(family(name))
    _, first = session.ask(START, said="", thought="")
    assert first["tool_calls"][0]["function"]["name"] == "bash"
    prompt, _ = session.ask([*START, first, *results(first)], said="Done.", calls=0)
    assert continues(prompt, session.sequence(0))


def _reworded(reply: Message) -> Message:
    return {**reply, "content": "I looked."}


def _renamed_tool(reply: Message) -> Message:
    changed = copy.deepcopy(reply)
    changed["tool_calls"][0]["function"]["name"] = "sh"
    return changed


def _other_arguments(reply: Message) -> Message:
    changed = copy.deepcopy(reply)
    changed["tool_calls"][1]["function"]["arguments"] = json.dumps({"command": "ls 1", "count": True})
    return changed


def _dropped_call(reply: Message) -> Message:
    return {**reply, "tool_calls": reply["tool_calls"][:1]}


def _swapped_calls(reply: Message) -> Message:
    return {**reply, "tool_calls": reply["tool_calls"][::-1]}


def _rethought(reply: Message) -> Message:
    return {**reply, "reasoning_content": "Something else."}


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (_reworded, "content"),
        (_renamed_tool, "tool_calls[0].name"),
        (_other_arguments, "tool_calls[1].arguments"),
        (_dropped_call, "tool_calls"),
        (_swapped_calls, "tool_calls[0].arguments"),
        (_rethought, "reasoning_content"),
    ],
)
def test_an_edited_reply_is_rendered_as_it_came_back(edit: Callable[[Message], Message], field: str) -> None:
    session = Session(family("qwen3", ALL))
    _, reply = session.ask(START, calls=2)
    edited = edit(sent_back(reply))
    prompt, _ = session.ask([*START, edited, *results(edited)])
    assert (prompt.how, prompt.why, prompt.from_call) == (How.RENDERED, Why.REPLY_EDITED, None)
    assert field in prompt.detail
    assert "call 0" in prompt.detail
    assert prompt.ids.tolist() == session.renderer.render([*START, edited, *results(edited)], TOOLS)


def _content_is_null(reply: Message) -> Message:
    return {**reply, "content": reply["content"] or None}


def _content_in_parts(reply: Message) -> Message:
    text = reply["content"]
    return {**reply, "content": [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]}


def _other_key_order(reply: Message) -> Message:
    changed = copy.deepcopy(reply)
    for call in changed["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    return changed


def _javascript_numbers(reply: Message) -> Message:
    changed = copy.deepcopy(reply)
    for call in changed["tool_calls"]:
        call["function"]["arguments"] = call["function"]["arguments"].replace(": 1}", ": 1.0}")
    return changed


def _other_ids(reply: Message) -> Message:
    changed = copy.deepcopy(reply)
    for number, call in enumerate(changed["tool_calls"]):
        call["id"] = f"toolu_{number}"
    return changed


def _more_fields(reply: Message) -> Message:
    return {**reply, "refusal": None, "annotations": [], "audio": None, "reasoning_content": ""}


@pytest.mark.parametrize(
    "change",
    [
        _content_is_null,
        _content_in_parts,
        _other_key_order,
        _javascript_numbers,
        _other_ids,
        _more_fields,
    ],
)
def test_what_agents_change_without_meaning_anything_is_no_edit(change: Callable[[Message], Message]) -> None:
    session = Session(family("qwen3", ALL))
    _, reply = session.ask(START, calls=2)
    returned = change(sent_back(reply))
    prompt, _ = session.ask([*START, returned, *results(returned)])
    assert (prompt.how, prompt.from_call) == (How.BRIDGED, 0)
    assert continues(prompt, session.sequence(0))


def test_a_retry_gets_the_very_prompt_and_each_retry_can_be_gone_on_from() -> None:
    session = Session(family("qwen3", ALL))
    _, root = session.ask(START)
    messages = [*START, sent_back(root), *results(root)]
    first, reply = session.ask(messages)
    second, _ = session.ask(messages)
    assert (second.how, second.from_call) == (How.REPEATED, 1)
    assert second.ids.tolist() == first.ids.tolist()
    # Both said the same; the ids of the tool calls say which one the agent took.
    prompt, _ = session.ask([*messages, sent_back(reply), *results(reply)])
    assert (prompt.how, prompt.from_call) == (How.BRIDGED, 1)
    assert continues(prompt, session.sequence(1))


def test_an_agent_that_goes_back_goes_on_from_the_earlier_turn() -> None:
    session = Session(family("qwen3", ALL))
    messages = list(START)
    for _ in range(3):
        _, reply = session.ask(messages)
        messages += [sent_back(reply), *results(reply)]
    prompt, _ = session.ask([*messages[:3], *results(messages[2], "other")])
    assert (prompt.how, prompt.from_call) == (How.BRIDGED, 0)
    assert continues(prompt, session.sequence(0))


def test_many_subagents_side_by_side_each_go_on_from_their_own() -> None:
    session = Session(family("qwen3", ALL))
    agents = [[START[0], {"role": "user", "content": f"Part {number}."}] for number in range(20)]
    last: dict[int, int] = {}
    for _turn in range(3):
        for number, messages in enumerate(agents):
            prompt, reply = session.ask(messages)
            if number in last:
                assert continues(prompt, session.sequence(last[number]))
            last[number] = len(session.calls) - 1
            messages += [sent_back(reply), *results(reply)]


def test_a_compaction_is_rendered_and_then_gone_on_from() -> None:
    session = Session(family("qwen3", ALL))
    messages = list(START)
    for _ in range(3):
        _, reply = session.ask(messages)
        messages += [sent_back(reply), *results(reply)]
    compacted = [START[0], {"role": "user", "content": "Summary: files were counted."}, *messages[-2:]]
    prompt, reply = session.ask(compacted)
    assert (prompt.how, prompt.why) == (How.RENDERED, Why.HISTORY_REWRITTEN)
    assert prompt.detail.startswith("messages[1]")
    after, _ = session.ask([*compacted, sent_back(reply), *results(reply)])
    assert continues(after, session.sequence(3))


def test_other_tools_make_another_prompt() -> None:
    session = Session(family("qwen3", ALL))
    _, reply = session.ask(START)
    prompt, _ = session.ask([*START, sent_back(reply), *results(reply)], tools=())
    assert (prompt.how, prompt.why) == (How.RENDERED, Why.TOOLS_CHANGED)


def test_an_assistant_message_that_nobody_gave_is_named() -> None:
    session = Session(family("qwen3", ALL))
    _, reply = session.ask(START)
    foreign = {"role": "assistant", "content": "I was never sampled."}
    prompt, _ = session.ask(
        [*START, sent_back(reply), *results(reply), foreign, {"role": "user", "content": "go on"}]
    )
    assert (prompt.how, prompt.why) == (How.RENDERED, Why.REPLY_UNKNOWN)
    history = [{"role": "user", "content": "hi"}, foreign, {"role": "user", "content": "go on"}]
    assert Session(family("qwen3", ALL)).ask(history)[0].why is Why.START


def test_a_reply_that_a_limit_cut_off_is_closed_and_gone_on_from() -> None:
    session = Session(family("qwen3", ALL))
    _, reply = session.ask(START, calls=0, said="word " * 40, cut=True)
    prompt, _ = session.ask([*START, sent_back(reply), {"role": "user", "content": "go on"}])
    assert continues(prompt, session.sequence(0))


def test_thinking_that_a_limit_cut_off_does_not_stay_open() -> None:
    session = Session(family("qwen3", ALL))
    _, reply = session.ask(START, thought="word " * 40, cut=True)
    assert reply["content"] is None
    prompt, _ = session.ask([*START, sent_back(reply), {"role": "user", "content": "go on"}])
    assert continues(prompt, session.sequence(0))
    assert text_of(session.renderer, prompt.ids.tolist()).count("go on") == 1


def test_ids_behind_the_end_of_a_turn_are_never_dropped_in_silence() -> None:
    session = Session(family("qwen3", ALL))
    encode = session.renderer.tokenizer.encode
    first = session.conversation.prompt(START, TOOLS, call_index=0)
    reply = session.answer(first, encode("Done.<|im_end|>\nmore"))
    prompt, _ = session.ask([*START, reply, {"role": "user", "content": "go on"}])
    # The package would cut them off: what was sampled would not be what the next turn is given.
    assert (prompt.how, prompt.why) == (How.RENDERED, Why.BRIDGE_REFUSED)


@pytest.mark.parametrize("name", FAMILIES)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data())
def test_whatever_is_sampled_is_gone_on_from_exactly_or_rendered(name: str, data: st.DataObject) -> None:
    session = Session(family(name, None if name == "llama-3" else ALL))
    messages = list(START)
    for index in range(3):
        prompt = session.conversation.prompt(messages, TOOLS, call_index=index)
        if index:
            assert prompt.how is How.BRIDGED or prompt.why is Why.BRIDGE_REFUSED
            assert prompt.how is How.RENDERED or continues(prompt, session.sequence(index - 1))
        reply = session.answer(prompt, data.draw(samples(name)))
        messages += [sent_back(reply), *results(reply)]
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": "go on"})


def test_a_call_that_failed_leaves_nothing_to_go_on_from() -> None:
    session = Session(family("qwen3", ALL))
    first = session.conversation.prompt(START, TOOLS, call_index=0)
    again = session.conversation.prompt(START, TOOLS, call_index=1)
    assert (again.how, again.from_call) == (How.REPEATED, 0)
    assert again.ids.tolist() == first.ids.tolist()
    unknown = [*START, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert session.conversation.prompt(unknown, TOOLS, call_index=2).why is Why.REPLY_UNKNOWN


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "critic", "content": "x"}, "critic"),
        ({"role": "user", "content": 5}, "neither text"),
    ],
)
def test_what_no_prompt_can_hold_is_refused_by_name(message: Message, what: str) -> None:
    conversation = TokenConversation(family("qwen3"))
    with pytest.raises(CannotRenderError, match=what):
        conversation.prompt([*START, message], TOOLS, call_index=0)
    assert conversation.prompt(START, TOOLS, call_index=1).why is Why.START


def test_a_developers_words_are_not_dropped() -> None:
    renderer = family("qwen3")
    ids = renderer.render([{"role": "developer", "content": "Be brief."}, START[1]])
    assert "Be brief." in renderer.tokenizer.decode(ids)


def test_memory_grows_with_what_is_new_alone() -> None:
    # The second half of a session that forks at every user message keeps no more ids than the first.
    session = Session(family("qwen3"))
    messages = list(START)
    kept = []
    for turn in range(40):
        _, reply = session.ask(messages, thought="Hm. " * 20)
        messages += [sent_back(reply), *results(reply), {"role": "user", "content": f"And {turn}?"}]
        turns = {id(rendered.turn): rendered.turn for rendered, _ in session.calls}
        kept.append(sum(len(turn.tail) + len(turn.sampled) for turn in turns.values()))
    assert all(prompt.why is Why.THINKING_DROPPED for prompt, _ in session.calls[1:])
    assert kept[39] - kept[19] < 1.3 * (kept[19] - kept[0])
    # And each prompt can still be told.
    for rendered, _ in session.calls:
        assert np.array_equal(rendered.turn.ids(), rendered.ids)


def test_an_unbroken_conversation_keeps_every_id_once() -> None:
    session = Session(family("qwen3", ALL))
    messages = list(START)
    for _ in range(10):
        _, reply = session.ask(messages)
        messages += [sent_back(reply), *results(reply)]
    kept = sum(len(rendered.turn.tail) + len(rendered.turn.sampled) for rendered, _ in session.calls)
    assert kept == len(session.sequence(9))


@st.composite
def behaviours(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = ["go on"] * 6 + ["user", "edit", "result", "back", "retry", "drop", "compact", "tools"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 2)), min_size=1, max_size=10))


@pytest.mark.parametrize("retention", [None, ALL])
@seeded
@given(behaviour=behaviours(), seed=st.integers(0, 99))
def test_whatever_an_agent_does_the_prompt_says_what_it_sent(
    retention: str | None, behaviour: list[tuple[str, int]], seed: int
) -> None:
    session = Session(family("qwen3", retention), seed)
    renderer, random = session.renderer, Random(seed)
    messages: list[Message] = copy.deepcopy(START)
    tools: Sequence[Any] = TOOLS
    for kind, calls in behaviour:
        if kind == "user":
            messages.append({"role": "user", "content": f"word {random.randrange(9)}"})
        elif kind == "edit" and len(messages) > 2:
            messages[random.randrange(2, len(messages))]["content"] = "edited <|im_end|>"
        elif kind == "result" and messages[-1]["role"] == "tool":
            messages[-1] = {**messages[-1], "content": "another result"}
        elif kind == "back":
            starts = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
            messages = messages[: random.choice(starts)] if starts else messages
        elif kind == "drop" and len(messages) > 3:
            del messages[random.randrange(2, len(messages))]
        elif kind == "compact":
            messages = [messages[0], {"role": "user", "content": "summary"}]
        elif kind == "tools":
            tools = () if tools else TOOLS
        prompt, reply = session.ask(messages, calls=calls, tools=tools)
        # What the model is given reads as the template writes what the agent sent, thinking aside.
        ids = prompt.ids.tolist()
        assert text_of(renderer, ids) == text_of(renderer, renderer.render(messages, tools))
        if prompt.how is How.BRIDGED:
            assert prompt.from_call is not None
            assert continues(prompt, session.sequence(prompt.from_call))
        if kind != "retry":
            messages = copy.deepcopy([*messages, sent_back(reply), *results(reply)])


@pytest.mark.parametrize("place", [2, 3, 4])
def test_a_late_edit_leaves_what_precedes_it_as_it_was_sampled(place: int) -> None:
    session = Session(family("qwen3", ALL))
    messages = list(START)
    for _ in range(6):
        _, reply = session.ask(messages, thought="", said="Some words of a reply.")
        messages += [sent_back(reply), *results(reply)]
    # A result is cleared, as agents do with old ones; replies behind it are rendered.
    at = [index for index, message in enumerate(messages) if message["role"] == "tool"][place]
    messages[at] = {**messages[at], "content": "[cleared]"}
    prompt, _ = session.ask(messages)
    assert (prompt.how, prompt.why) == (How.RENDERED, Why.HISTORY_REWRITTEN)
    assert prompt.ids[: len(session.sequence(place))].tolist() == session.sequence(place)
    canonical = session.renderer.render(messages, TOOLS)
    assert session.renderer.tokenizer.decode(prompt.ids.tolist()) == session.renderer.tokenizer.decode(
        canonical
    )
    assert prompt.ids.tolist() != canonical


def test_a_reply_is_spliced_whole_or_not_at_all() -> None:
    session = Session(family("qwen3", ALL), seed=3)
    _, reply = session.ask(START, calls=0, thought="", said="One two three four five six.")
    edited = {**sent_back(reply), "content": "One two three four five 6."}
    prompt, _ = session.ask([*START, edited, {"role": "user", "content": "go on"}])
    canonical = session.renderer.render([*START, edited, {"role": "user", "content": "go on"}], TOOLS)
    assert prompt.ids.tolist() == canonical
