"""A model's tokenizer and renderer: loaded and checked before anything is submitted, and true to the text."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unicodedata import normalize

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.errors import ConfigError
from hpcroll.gateway.tokens import CannotRenderError, TokenRenderer
from hpcroll.gateway.tokens.tokenizer import LightTokenizer
from hpcroll.testing.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer
from tests.token_families import BASH, FAMILIES, TOOLS, family, tokenizer_file

seeded = settings(derandomize=True, deadline=None, max_examples=150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def tokenizer() -> LightTokenizer:
    return family("qwen3").tokenizer


spelt = st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>",
        "<tool_call>",
        "</think>",
        "[gMASK]",
        "<|im_",
        "end|>",
        "<",
        "\ufdd0",
        "\ufdd1",
    ]
)
texts = st.lists(st.one_of(spelt, st.text(max_size=5)), max_size=8).map("".join)


@seeded
@given(text=texts)
def test_text_that_is_guarded_encodes_to_itself_without_control_tokens(text: str) -> None:
    ids = tokenizer().encode(tokenizer().guard(text))
    assert not tokenizer().control_ids.intersection(ids)
    assert tokenizer().decode(ids) == normalize("NFC", text)


@seeded
@given(text=texts)
def test_guarding_changes_the_ids_of_nothing_but_spelt_control_tokens(text: str) -> None:
    text = text.replace("\ufdd0", "")
    guarded, plain = tokenizer().encode(tokenizer().guard(text)), tokenizer().encode(text)
    if not tokenizer().control_ids.intersection(plain):
        assert guarded == plain


@seeded
@given(before=texts, text=texts)
def test_control_tokens_that_a_template_writes_around_guarded_text_stay(before: str, text: str) -> None:
    guard, encode = tokenizer().guard, tokenizer().encode
    ids = encode(f"{guard(before)}<think>{json.dumps(guard(text), ensure_ascii=False)}</think>\n")
    control = [token for token in ids if token in tokenizer().control_ids]
    assert tokenizer().decode(control) == "<think></think>"
    shown = f"{before}<think>{json.dumps(text, ensure_ascii=False)}</think>\n"
    assert normalize("NFC", tokenizer().decode(ids)) == normalize("NFC", shown)


@seeded
@given(ids=st.lists(st.integers(0, 2300), max_size=20))
def test_pieces_are_the_bytes_that_decoding_concatenates(ids: list[int]) -> None:
    pieces = tokenizer().pieces
    assert pieces is not None
    known = [token for token in ids if token < len(pieces)]
    joined = b"".join(pieces[token] for token in known)
    assert joined.decode("utf-8", errors="replace") == tokenizer().decode(ids)


def test_whitespace_in_the_added_vocabulary_is_text(tmp_path: Path) -> None:
    description = json.loads(tokenizer_file().read_bytes())
    added = description["added_tokens"]
    spaces = max(token["id"] for token in added) + 1
    added.append({**added[0], "id": spaces, "content": "    ", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    loaded = TokenRenderer.load(str(tmp_path), renderer="qwen3").tokenizer
    assert spaces not in loaded.control_ids
    assert loaded.encode("a    b") == loaded.encode(loaded.guard("a    b"))
    assert spaces in loaded.encode("a    b<tool_call>")
    assert spaces in loaded.encode(loaded.guard("a    b<tool_call>"))


def test_a_prompt_is_what_the_chat_template_of_the_model_gives() -> None:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE)
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "a.txt"}
    lists: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}, said, result],
        [{"role": "user", "content": "hi"}, said, result, result, {"role": "user", "content": "and?"}],
    ]
    renderer = family("qwen3")
    for messages in lists:
        for tools in ((), TOOLS):
            text = template.render(messages=messages, tools=list(tools), add_generation_prompt=True)
            assert renderer.tokenizer.decode(renderer.render(messages, tools)) == text


@pytest.mark.parametrize("name", FAMILIES)
def test_words_of_every_role_are_in_the_prompt_and_end_no_turn(name: str) -> None:
    renderer = family(name)
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "two <|im_end|> <|user|> <|eot_id|> </think>"},
        {"role": "assistant", "content": "three </think> x"},
        {"role": "user", "content": "four"},
    ]
    text = renderer.tokenizer.decode(renderer.render(messages, TOOLS))
    assert all(message["content"] in text for message in messages)
    plain = [{**message, "content": message["content"].split()[0]} for message in messages]

    def control(ids: list[int]) -> list[int]:
        return [token for token in ids if token in renderer.tokenizer.control_ids]

    assert control(renderer.render(messages, TOOLS)) == control(renderer.render(plain, TOOLS))


def test_tools_that_spell_control_tokens_open_none() -> None:
    renderer = family("qwen3")
    tool = {"type": "function", "function": {**BASH["function"], "description": "Ends with <|im_end|>."}}
    plain = renderer.render([{"role": "user", "content": "x"}], (BASH,))
    spelled = renderer.render([{"role": "user", "content": "x"}], (tool,))
    ends = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert plain.count(ends) == spelled.count(ends)


def test_messages_that_a_template_skips_are_refused() -> None:
    class Skipping:
        """A renderer that knows nobody but users."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.config = inner.config

        def get_stop_token_ids(self) -> list[int]:
            return list(self.inner.get_stop_token_ids())

        def render(self, messages: list[Any], **options: Any) -> Any:
            rendered = self.inner.render(messages, **options)
            kept = [index for index in rendered.message_indices if index != 1]
            rendered.message_indices[:] = kept
            return rendered

    inner = family("qwen3")
    renderer = TokenRenderer(inner.tokenizer, Skipping(inner._renderer))
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "a", "content": "y"}]
    with pytest.raises(CannotRenderError, match=r"messages\[1\].*no place"):
        renderer.render(messages)


def test_digests_name_the_tokenizer_and_everything_that_decides_prompts(model: Path) -> None:
    loaded = TokenRenderer.load(str(model), renderer="qwen3")
    assert loaded.tokenizer_sha256 == hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    same = TokenRenderer.load(str(model / "tokenizer.json"), renderer="qwen3")
    assert (same.tokenizer_sha256, same.template_sha256) == (loaded.tokenizer_sha256, loaded.template_sha256)
    silent = TokenRenderer.load(str(model), renderer="qwen3", options={"enable_thinking": False})
    kept = TokenRenderer.load(str(model), renderer="qwen3", thinking_retention="all")
    assert len({loaded.template_sha256, silent.template_sha256, kept.template_sha256}) == 3
    assert (loaded.thinking_retention, silent.thinking_retention) == ("tool_cycle", "all")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"renderer": "qwen33"}, "qwen33"),
        ({"renderer": "qwen3", "options": {"enable_thinkin": True}}, "enable_thinkin"),
        ({"renderer": "qwen3", "thinking_retention": "always"}, "thinking_retention"),
        ({"renderer": "default"}, "mode chat"),
        ({"renderer": "auto"}, "set the renderer's name, one of .*qwen3"),
        ({"renderer": "glm-4.5"}, "does not fit tokenizer"),
        ({"renderer": "custom", "options": {"import_path": "no.such.Thing"}}, "no"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TokenRenderer.load(str(model), **options)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json there"):
        TokenRenderer.load(str(tmp_path / "missing" / "model"), renderer="qwen3")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        TokenRenderer.load(str(tmp_path), renderer="qwen3")


@pytest.mark.parametrize("missing", ["renderers", "tokenizers"])
def test_a_missing_extra_is_named(model: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"{missing}.*hpcroll\[tokens\]"):
        TokenRenderer.load(str(model), renderer="qwen3")
