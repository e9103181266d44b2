"""A reply that is read while it is sampled is the reply, whatever was sampled and however it was cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.gateway.chat import Delta, MessageBuilder
from hpcroll.gateway.tokens import Finished, ReplyStream, TokenRenderer
from tests.token_families import FAMILIES, TOOLS, family, resplit, samples, spell

seeded = settings(derandomize=True, deadline=None, max_examples=25)
QUESTION = [{"role": "user", "content": "Count the files."}]


def prompt_of(renderer: TokenRenderer) -> np.ndarray:
    return np.asarray(renderer.render(QUESTION, TOOLS), dtype=np.uint32)


def read(
    renderer: TokenRenderer, ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[Delta], Finished]:
    stream = ReplyStream(renderer, prompt_of(renderer), TOOLS, stop=stop)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    deltas = [stream.feed(ids[start:end]) for start, end in pairwise(edges)]
    return deltas, stream.finish()


def together(deltas: Sequence[Delta]) -> object:
    builder = MessageBuilder()
    for delta in deltas:
        builder.add(delta)
    return builder.message()


@pytest.mark.parametrize("name", FAMILIES)
@seeded
@given(data=st.data())
def test_deltas_add_up_to_the_message_whatever_is_sampled(name: str, data: st.DataObject) -> None:
    renderer = family(name)
    ids = data.draw(samples(name))
    cuts = data.draw(st.lists(st.integers(1, max(len(ids), 1)), max_size=8))
    deltas, finished = read(renderer, ids, cuts)
    assert together([*deltas, finished.delta]) == finished.message
    # And the message is what the whole reply says: showing parts early changed nothing.
    parsed = renderer.parse(ids, renderer.tail(prompt_of(renderer)), TOOLS)
    calls = [call["id"] for call in finished.message.get("tool_calls", ())]
    assert parsed.message(calls) == finished.message
    assert finished.ids == ids


THOUGHT = "Let me see.\n\nTwo steps: ü."
CONTENTS = ("I look — 你好 \U0001f600.", "a < b </tool_call")


def replies(name: str) -> list[tuple[str, str, int]]:
    """Thinking, content and number of tool calls of replies that the family's format can say."""
    if name == "llama-3":
        return [("", content, 0) for content in CONTENTS] + [("", "", 1)]
    # The template of prime-qwen3 writes no thinking beside tool calls.
    thoughts = [""] if name.endswith("-silent") or name == "prime-qwen3" else ["", THOUGHT]
    return [
        (thought, content, calls) for thought in thoughts for content in CONTENTS for calls in range(3)
    ] + [(thought, "", calls) for thought in thoughts for calls in (1, 2)]


@pytest.mark.parametrize(
    ("name", "thought", "content", "calls"), [(name, *reply) for name in FAMILIES for reply in replies(name)]
)
def test_what_a_template_writes_is_read_back(name: str, thought: str, content: str, calls: int) -> None:
    renderer = family(name)
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": "bash",
                    "arguments": json.dumps({"command": f"ls -{number}", "count": 3}),
                },
            }
            for number in range(calls)
        ],
    }
    if thought:
        message["reasoning_content"] = thought
    prompt = renderer.render(QUESTION, TOOLS)
    # A tool's result follows, for a template that drops thinking once the user speaks.
    result = {"role": "tool", "tool_call_id": "call_0", "content": "x"}
    whole = renderer.render([*QUESTION, message, result], TOOLS)
    shared = next(at for at, token in enumerate(whole) if at >= len(prompt) or token != prompt[at])
    # From where the two part: the reply as the template writes it, and then the next turn.
    end = next(at for at in range(shared, len(whole)) if whole[at] in renderer.stop_ids)
    start = min(shared, len(prompt))
    sampled = whole[start : end + 1]
    _, finished = read(renderer, sampled, range(len(sampled)))
    given = [call["function"]["name"] for call in finished.message.get("tool_calls", ())]
    arguments = [json.loads(call["function"]["arguments"]) for call in finished.message.get("tool_calls", ())]
    assert given == ["bash"] * calls
    assert arguments == [{"command": f"ls -{number}", "count": 3} for number in range(calls)]
    assert (finished.message["content"] or "") == content
    assert finished.message.get("reasoning_content", "") == thought
    assert not finished.malformed


def test_text_is_shown_as_it_comes() -> None:
    renderer = family("qwen3")
    ids = renderer.tokenizer.encode("<think>\nfirst this\n</think>\n\nthen that")
    deltas, finished = read(renderer, ids, range(len(ids)))
    assert "".join(delta.reasoning for delta in deltas) == "first this"
    # The last words may still turn out to be followed by white space alone.
    assert "".join(delta.content for delta in deltas) == "then that"
    assert not finished.delta


def test_no_half_character_is_shown() -> None:
    renderer = family("qwen3")
    ids = resplit(renderer, renderer.tokenizer.encode("a \U0001f600 b"), Random(0), share=1.0)
    deltas, finished = read(renderer, ids, range(len(ids)))
    assert finished.message["content"] == "a \U0001f600 b"
    assert all("\ufffd" not in delta.content for delta in deltas)
    assert sum(bool(delta) for delta in deltas) > 2


def test_a_control_token_that_is_only_spelt_is_text() -> None:
    renderer = family("qwen3")
    text = 'write <tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call> to call'
    _, finished = read(renderer, spell(renderer, text), range(99))
    assert finished.message == {"role": "assistant", "content": text}


def test_an_end_of_thinking_that_is_only_spelt_ends_none() -> None:
    renderer = family("qwen3")
    encode = renderer.tokenizer.encode
    ids = [*encode("<think>\n"), *spell(renderer, "it says </think> here"), *encode("\n</think>\n\nDone")]
    _, finished = read(renderer, ids, range(99))
    assert finished.message["reasoning_content"] == "it says </think> here"
    assert finished.message["content"] == "Done"


@pytest.mark.parametrize(
    ("block", "status"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>', "invalid_json"),
        ('<tool_call>\n{"name": "bash"', "unclosed_block"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "missing_name"),
        ('<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>', "ok"),
        ('<tool_call>\n{"name": "bash", "arguments": {"a": NaN}}\n</tool_call>', "ok"),
    ],
)
def test_a_call_that_cannot_be_read_is_shown_as_text(block: str, status: str) -> None:
    renderer = family("qwen3")
    good = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    _, finished = read(renderer, renderer.tokenizer.encode(f"Now.\n{good}\n{block}"), [])
    assert finished.message["content"] == f"Now.\n{block}"
    assert len(finished.message["tool_calls"]) == 1
    assert finished.malformed == (status,)


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 3000, '{"a":' * 3000])
def test_arguments_that_no_parser_takes_lose_nothing(text: str) -> None:
    renderer = family("qwen3")
    reply = '<tool_call>\n{"name": "bash", "arguments": ' + text + "}\n</tool_call>"
    _, finished = read(renderer, renderer.tokenizer.encode(reply), [])
    calls = finished.message.get("tool_calls", ())
    assert text in "".join([finished.message["content"] or "", *(c["function"]["arguments"] for c in calls)])


def test_an_unknown_tool_is_called_so_that_the_agent_can_say_so() -> None:
    renderer = family("glm-4.5-silent")
    reply = "<tool_call>fly\n<arg_key>to</arg_key>\n<arg_value>moon</arg_value>\n</tool_call>"
    _, finished = read(renderer, renderer.tokenizer.encode(reply), [])
    assert finished.message["tool_calls"][0]["function"] == {"name": "fly", "arguments": '{"to": "moon"}'}


@pytest.mark.parametrize("size", [1, 2, 50])
def test_a_stop_string_and_what_follows_are_not_shown(size: int) -> None:
    renderer = family("qwen3-silent")
    ids = renderer.tokenizer.encode("One.\nOBSERV is fine.\nOBSERVATION: two")
    deltas, finished = read(renderer, ids, range(0, len(ids), size), stop=["OBSERVATION:", "never"])
    assert together([*deltas, finished.delta]) == finished.message
    assert finished.message["content"] == "One.\nOBSERV is fine."
    assert finished.ids == ids


def test_thinking_that_a_limit_cut_off_is_thinking() -> None:
    renderer = family("qwen3")
    _, finished = read(renderer, renderer.tokenizer.encode("<think>\nso far"), range(9))
    assert finished.message == {"role": "assistant", "content": None, "reasoning_content": "so far"}


def test_ids_of_tool_calls_are_never_given_twice() -> None:
    renderer = family("qwen3")
    ids = renderer.tokenizer.encode('<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>' * 2)
    given = [call["id"] for _ in range(3) for call in read(renderer, ids, [])[1].message["tool_calls"]]
    assert len(set(given)) == 6
