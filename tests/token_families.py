"""Renderers of several model families over the small tokenizer, with their control tokens added to it."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from hpcroll.gateway.tokens import TokenRenderer
from hpcroll.testing.tiny_tokenizer import tiny_tokenizer

_MORE_CONTROL = (
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)

THINKING: dict[str, Any] = {"enable_thinking": True}
SILENT: dict[str, Any] = {"enable_thinking": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-silent": ("qwen3", SILENT),
    "prime-qwen3": ("prime-qwen3", {}),
    "qwen3.5": ("qwen3.5", THINKING),
    "qwen3.5-silent": ("qwen3.5", SILENT),
    "qwen3.6": ("qwen3.6", THINKING),
    "qwen3.8": ("qwen3.8", THINKING),
    "glm-4.5": ("glm-4.5", THINKING),
    "glm-4.5-silent": ("glm-4.5", SILENT),
    "glm-5": ("glm-5", THINKING),
    "glm-5.1": ("glm-5.1", THINKING),
    "glm-5.3": ("glm-5.3", {}),
    "nemotron-3": ("nemotron-3", THINKING),
    "nemotron-3-ultra": ("nemotron-3-ultra", THINKING),
    "nemotron-3.5": ("nemotron-3.5", THINKING),
    "llama-3": ("llama-3", {}),
}

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["command"],
        },
    },
}
TOOLS = (BASH,)

SNIPPETS = (
    "<think>",
    "</think>",
    "<think>\nLet me see.\n</think>\n\n",
    "Grüße 你好 \U0001f600!",
    " ",
    "\n\n",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>",
    "</tool_call>",
    "not {json",
    '{"name": "bash", "parameters": {"command": "ls"}}',
)
"""What looks like replies, or like parts of them."""


@cache
def tokenizer_file() -> Path:
    """`tokenizer.json` of the small tokenizer with the control tokens of every family here."""
    description = json.loads(tiny_tokenizer().backend.to_str())
    added = description["added_tokens"]
    first = max(token["id"] for token in added) + 1
    for number, content in enumerate(_MORE_CONTROL):
        added.append({**added[0], "id": first + number, "content": content})
    # Lives as long as the process: renderers are cached for as long.
    path = Path(tempfile.mkdtemp(prefix="hpcroll-tokens-")) / "tokenizer.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    return path


@cache
def family(name: str, thinking_retention: str | None = None) -> TokenRenderer:
    """The renderer of one of `FAMILIES`."""
    renderer, options = FAMILIES[name]
    return TokenRenderer.load(
        str(tokenizer_file()), renderer=renderer, options=options, thinking_retention=thinking_retention
    )


def resplit(renderer: TokenRenderer, ids: list[int], random: Random, share: float = 0.5) -> list[int]:
    """Other ids for the same text: some tokens are replaced by those of their single bytes."""
    pieces = renderer.tokenizer.pieces
    assert pieces is not None
    single = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}
    result = []
    for token in ids:
        if token in renderer.tokenizer.control_ids or random.random() > share:
            result.append(token)
        else:
            result += [single[pieces[token][at : at + 1]] for at in range(len(pieces[token]))]
    return result


def spell(renderer: TokenRenderer, text: str) -> list[int]:
    """The ids of `text` with no control token among them."""
    return renderer.tokenizer.encode(renderer.tokenizer.guard(text))


@st.composite
def samples(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of any kind: noise, control tokens, control tokens that are spelt, and what looks like replies."""
    renderer = family(name)
    size = len(renderer.tokenizer.pieces or ())
    ids: list[int] = []
    for kind in draw(st.lists(st.sampled_from(["noise", "control", "snippet", "spelt"]), max_size=8)):
        if kind == "noise":
            ids += draw(st.lists(st.integers(0, size - 1), max_size=6))
        elif kind == "control":
            ids.append(draw(st.sampled_from(sorted(renderer.tokenizer.control_ids))))
        elif kind == "snippet":
            ids += renderer.tokenizer.encode(draw(st.sampled_from(SNIPPETS)))
        else:
            ids += spell(renderer, draw(st.sampled_from(SNIPPETS)))
    if draw(st.booleans()):
        ids = resplit(renderer, ids, Random(draw(st.integers(0, 3))))
    if draw(st.booleans()):
        ids.append(renderer.stop_ids[0])
    return ids
