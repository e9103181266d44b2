"""The small tokenizer is a real one: any text, any process, and the template of the model it stands for."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

from hpcroll.testing.tiny_tokenizer import (
    CHAT_TEMPLATE,
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    tiny_tokenizer,
    write_tokenizer,
)

_SHA256 = "import hashlib; from hpcroll.testing.tiny_tokenizer import tiny_tokenizer as t"
_SHA256 += "; print(hashlib.sha256(t().backend.to_str().encode()).hexdigest())"

CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls é"}}}
TOOL = {"type": "function", "function": {"name": "bash", "description": "é <x> 'q' & 🙂", "parameters": {}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning_content": "hm\n", "content": "ok", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "out"},
        {"role": "tool", "content": "more"},
        {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [CALL]},
        {"role": "tool", "content": "o"},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "<think>\nq\n</think>\n\nold"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "yes"},
    ],
]


def test_any_text_decodes_to_itself_in_composed_form() -> None:
    tokens = tiny_tokenizer()
    for text in ("", "def f(x):\n    return x\n", "naïve 𝄞 déjà vu 漢字 🧨 \u0000\u202e", "x" * 999):
        assert tokens.decode(tokens.encode(text)) == text
    assert tokens.decode(tokens.encode("e\u0301")) == "\u00e9"
    assert 2000 < len(tokens) < 4000


def test_control_tokens_are_one_id_each() -> None:
    tokens = tiny_tokenizer()
    for token in (*SPECIAL_TOKENS, *MARKER_TOKENS):
        assert tokens.encode(token) == [tokens.convert_tokens_to_ids(token)]
        hidden = tokens.decode(tokens.encode(token), skip_special_tokens=True)
        assert hidden == ("" if token in SPECIAL_TOKENS else token)


def test_ids_are_the_same_in_every_process() -> None:
    here = hashlib.sha256(tiny_tokenizer().backend.to_str().encode()).hexdigest()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        done = subprocess.run(
            [sys.executable, "-c", _SHA256], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.strip() == here, done.stderr


def test_written_directory_loads_to_the_same_ids(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "a" / "tokenizer")
    loaded, text = Tokenizer.from_file(str(folder / "tokenizer.json")), "<|im_start|>user\nnaïve 🧨"
    assert loaded.encode(text).ids == tiny_tokenizer().encode(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("generate", [False, True])
def test_chat_template_says_what_the_renderer_says(
    conversation: list[dict[str, Any]], tools: list[Any] | None, generate: bool
) -> None:
    # As transformers sets it up: blocks leave no white space, JSON keeps characters beyond ASCII.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(CHAT_TEMPLATE).render(
        messages=conversation, tools=tools, add_generation_prompt=generate
    )
    tokens = tiny_tokenizer()
    ids = Qwen3Renderer(tokens).render_ids(conversation, tools=tools, add_generation_prompt=generate)
    assert tokens.encode(text) == ids
