"""A small tokenizer with the control tokens and the chat template of Qwen3, made from a shipped text.

`tiny_tokenizer()` is a byte-level BPE of about 3,000 ids that encodes any text; `write_tokenizer` makes a
directory of it which `transformers`, vLLM and SGLang load (`tokenizer.json`, `tokenizer_config.json`).
Equal versions of the package `tokenizers` give equal ids, in every process and on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcroll.errors import ConfigError

TEXT_IDS = 3000
"""Ids below belong to text, the control tokens follow; the text may give fewer merges than that."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Left out of text that is decoded with `skip_special_tokens`."""
MARKER_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""One id each, and visible in decoded text, as in the real one."""
END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"

_CORPUS = Path(__file__).with_name("tiny_corpus.jsonl")
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before merging: letters with what precedes them, single digits, runs of the rest."""

CHAT_TEMPLATE = """\
{%- macro open(role) %}{{ '<|im_start|>' + role }}{% endmacro %}
{%- macro close() %}{{ '<|im_end|>\\n' }}{% endmacro %}
{%- macro flat(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable %}
        {%- for part in content %}{{ part if part is string else part.text | default('') }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- set head = flat(messages[0].content) if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- open('system\\n') }}
    {%- if messages[0].role == 'system' %}{{ head + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- close() }}
{%- elif messages[0].role == 'system' %}
    {{- open('system\\n') + head + close() }}
{%- endif %}
{%- set last = namespace(query=messages | length - 1) %}
{%- for message in messages %}
    {%- set text = flat(message.content) | trim %}
    {%- if message.role == 'user'
        and not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
        {%- set last.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set now = namespace(text=flat(message.content), thought='') %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- open(message.role + '\\n') + now.text + close() }}
    {%- elif message.role == 'assistant' %}
        {%- if message.reasoning_content is string %}
            {%- set now.thought = message.reasoning_content %}
        {%- elif '</think>' in now.text %}
            {%- set now.thought = now.text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set now.text = now.text.split('</think>', 1)[1].lstrip('\\n') %}
        {%- endif %}
        {{- open('assistant\\n') }}
        {%- if loop.index0 > last.query and (loop.last or now.thought) %}
            {{- '<think>\\n' + now.thought.strip('\\n') + '\\n</think>\\n\\n' + now.text.lstrip('\\n') }}
        {%- else %}
            {{- now.text }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {{- '\\n' if now.text or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- close() }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ open('user') }}{% endif %}
        {{- '\\n<tool_response>\\n' + now.text + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ close() }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- open('assistant\\n') }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


class TinyTokenizer:
    """The tokenizer as the package `renderers` wants one that is brought along."""

    name_or_path = "hpcroll/tiny-qwen3"
    unk_token_id: int | None = None

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        """The `tokenizers.Tokenizer`."""
        self.eos_token_id: int | None = backend.token_to_id(END_OF_TURN)

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`; control tokens spelt in it become their ids, as in real ones."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 are replaced."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of one token, None where there is none; a list for several."""
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]


@cache
def tiny_tokenizer() -> TinyTokenizer:
    """The tokenizer, made once per process (well under a second).

    Raises `ConfigError` where the package `tokenizers` is not installed.
    """
    try:
        tokenizers = import_module("tokenizers")
    except ImportError:
        raise ConfigError("the small tokenizer needs a package: pip install 'hpcroll[testing]'") from None
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TEXT_IDS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(_corpus(), trainer)
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in MARKER_TOKENS])
    return TinyTokenizer(backend)


def write_tokenizer(directory: Path) -> Path:
    """Writes the tokenizer into `directory` (made where it is missing), and returns that.

    Raises `ConfigError` where the package `tokenizers` is not installed.
    """
    tokenizer = tiny_tokenizer()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return directory


def _corpus() -> list[str]:
    return [json.loads(line) for line in _CORPUS.read_text(encoding="utf-8").splitlines()]
