"""Chat messages to token ids and back, by the renderer of the model's family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from hpcroll.config import ModelConfig, ModelMode
from hpcroll.contract import Ids, canonical_json, sha256_hex
from hpcroll.errors import ConfigError
from hpcroll.gateway.chat import Message, assistant_message
from hpcroll.gateway.tokens.messages import CannotRenderError, map_text, plain_message, with_tool_names
from hpcroll.gateway.tokens.tokenizer import LightTokenizer, load_tokenizer, need

AUTO = "auto"
TAGGED = frozenset(
    {
        "glm-4.5",
        "glm-5",
        "glm-5.1",
        "glm-5.3",
        "nemotron-3",
        "nemotron-3-ultra",
        "nemotron-3.5",
        "prime-qwen3",
        "qwen3",
        "qwen3.5",
        "qwen3.6",
        "qwen3.8",
    }
)
"""Families whose thinking and tool calls stand between control tokens: what precedes them can be streamed."""
_DEVELOPERS = frozenset({"deepseek-v4", "gemma4", "gpt-oss"})
"""Families that know the role `developer`; it is `system` for the others."""
_NAMED_RESULTS = frozenset({"gemma4", "gpt-oss", "inkling"})
"""Families that write the function's name at a tool's result."""
_OWN_ENCODERS = frozenset({"gpt-oss"})
"""Families that encode some text by themselves: nothing may be marked in it."""
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What parsers raise for replies that only a model could write (numbers of 5,000 digits, deep nesting)."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply, read."""

    content: str
    """Stripped; with the text of the tool calls that could not be read."""
    reasoning: str
    """Stripped."""
    tool_calls: tuple[tuple[str | None, str, str], ...]
    """(id where the model wrote one, name, arguments as JSON text) of each call that could be read."""
    thinking: bool
    """The reply ends within its thinking."""
    malformed: tuple[str, ...]
    """Why, for each tool call that is shown as text."""

    def message(self, ids: Sequence[str]) -> Message:
        """The assistant message, its tool calls named by `ids` unless the model did."""
        calls = [
            {"id": native or own, "type": "function", "function": {"name": name, "arguments": arguments}}
            for own, (native, name, arguments) in zip(ids, self.tool_calls, strict=True)
        ]
        return assistant_message(self.content, self.reasoning, calls)


class TokenRenderer:
    """One model's template. Stateless and safe to share between threads."""

    def __init__(self, tokenizer: LightTokenizer, renderer: Any) -> None:
        self.tokenizer = tokenizer
        self.family: str = renderer.config.name
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        """Tokens that end a reply."""
        self.thinking_retention: str = getattr(renderer, "effective_thinking_retention", "template")
        """How long the thinking of a turn stays in the context.

        `all`: for good. `tool_cycle`: until the next user message. `template`: for its turn.
        """
        self.tokenizer_sha256 = tokenizer.sha256
        """SHA-256 of `tokenizer.json`."""
        options = renderer.config.model_dump(mode="json")
        self.template: dict[str, Any] = {
            "renderers": version("renderers"),
            "renderer": f"{type(renderer).__module__}.{type(renderer).__qualname__}",
            "options": options,
            "thinking_retention": self.thinking_retention,
        }
        """What decides the prompts, beside the tokenizer."""
        self.template_sha256 = sha256_hex(canonical_json(self.template).encode())
        self.streams = self.family in TAGGED and tokenizer.pieces is not None
        """Whether text can be shown before a reply is complete."""
        self._renderer = renderer
        self._guards = self.family not in _OWN_ENCODERS

    @classmethod
    def load(
        cls,
        tokenizer: str,
        *,
        renderer: str = AUTO,
        options: Mapping[str, Any] | None = None,
        thinking_retention: str | None = None,
    ) -> TokenRenderer:
        """The renderer of a model.

        `tokenizer`: a directory with `tokenizer.json`, such a file, or a name on the hub. `renderer`: a name
        of the `renderers` package; `auto` finds it by the name on the hub. `options`: the renderer's own
        (`enable_thinking`, ...). `thinking_retention`: `tool_cycle` or `all`; the template's own where None.
        Raises `ConfigError` for what is missing, unknown or does not fit.
        """
        library, configs = need("renderers"), need("renderers.configs")
        loaded = load_tokenizer(tokenizer)
        name = _family_of(loaded.name_or_path, library) if renderer == AUTO else renderer
        fields: dict[str, Any] = {**(options or {}), "name": name}
        if thinking_retention is not None:
            fields["thinking_retention"] = thinking_retention
        # What a renderer of one's own raises can be anything, here and where it is made.
        try:
            config: Any = TypeAdapter(configs.RendererConfig).validate_python(fields)
        except Exception as error:
            raise ConfigError(f"renderer {name}: {type(error).__name__}: {error}") from error
        if config.name in ("auto", "default"):
            raise ConfigError(
                f"renderer {config.name}: it cannot extend a conversation exactly, so that every turn would "
                "be rendered anew; name the model's family, or use mode chat"
            )
        try:
            return cls(loaded, library.create_renderer(loaded, config))
        except Exception as error:
            raise ConfigError(
                f"renderer {name} does not fit tokenizer {tokenizer}: {type(error).__name__}: {error}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """The prompt's ids, up to where the assistant begins to write.

        Raises `CannotRenderError` for messages that the template has no place for.
        """
        plain = [plain_message(message, index) for index, message in enumerate(messages)]
        return self.render_plain(plain, tools)

    def render_plain(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """`render`, of messages that are plain."""
        prepared = self._prepare(messages)
        try:
            rendered = self._renderer.render(prepared, tools=self._tools(tools), add_generation_prompt=True)
        except _UNREADABLE as error:
            raise CannotRenderError(f"renderer {self.family}: {type(error).__name__}: {error}") from error
        present = set(rendered.message_indices)
        for index, message in enumerate(messages):
            # Templates skip what they do not know; the model would answer something nobody asked.
            if index not in present and message["role"] not in ("system", "developer"):
                raise CannotRenderError(
                    f"messages[{index}]: the template of {self.family} has no place for role "
                    f"{message['role']!r} here"
                )
        return list(rendered.token_ids)

    def bridge(
        self,
        prompt_ids: Ids,
        sampled_ids: Ids,
        messages: Sequence[Message],
        *,
        before: Sequence[Message] = (),
        tools: Sequence[Any] = (),
    ) -> list[int] | None:
        """What follows `prompt_ids` and `sampled_ids` in the prompt that goes on from them.

        `messages`: plain, what came after the reply; `before`: the plain messages up to it. None where the
        template, or the retention of thinking, does not allow it.
        """
        prompt, sampled = self.tail(prompt_ids), sampled_ids.tolist()
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt, sampled, self._prepare(messages, before), tools=self._tools(tools)
            )
        except _UNREADABLE:
            return None
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        middle, end = len(prompt), len(prompt) + len(sampled)
        # The renderer's promise, checked: training rests on it.
        if ids[:middle] != prompt or ids[middle:end] != sampled:
            return None
        return ids[end:]

    def tail(self, prompt_ids: Ids) -> list[int]:
        """As much of a prompt's end as `parse` and the package's bridge look at."""
        if self.family not in TAGGED:
            return list(prompt_ids.tolist())
        ends = np.flatnonzero(np.isin(prompt_ids, self.stop_ids))
        return list(prompt_ids[ends[-1] if len(ends) else 0 :].tolist())

    def parse(self, sampled_ids: list[int], tail: list[int], tools: Sequence[Any] = ()) -> Parsed:
        """Reads a reply to the prompt that ends with `tail`.

        What is no message of the family's grammar is text.
        """
        try:
            response = self._renderer.parse_response(sampled_ids, tools=list(tools) or None, prompt_ids=tail)
        except _UNREADABLE as error:
            end = next((index for index, token in enumerate(sampled_ids) if token in self.stop_ids), None)
            text = self.tokenizer.decode(sampled_ids[:end]).strip()
            return Parsed(text, "", (), False, (f"{type(error).__name__}: {error}",))
        reasoning = (response.reasoning_content or "").strip()
        content = (response.content or "").strip()
        if self.family == "qwen3" and response.reasoning_complete and "</think>" in reasoning:
            # Its parser ends thinking at the first end mark that is spelt, also where text spells it.
            spelt = reasoning.count("</think>")
            content = content.split("</think>", spelt)[-1].strip()
        calls, texts, malformed = [], [content] if content else [], []
        for call in response.tool_calls:
            arguments = _arguments_text(call.arguments)
            named = isinstance(call.name, str) and call.name.strip() != ""
            if named and arguments is not None and str(call.status) in ("ok", "unknown_tool", "invalid_json"):
                calls.append((call.id, call.name, arguments))
                continue
            span = call.token_span
            texts.append(self.tokenizer.decode(sampled_ids[slice(*span)]) if span else call.raw)
            malformed.append(str(call.status))
        return Parsed(
            "\n".join(texts).strip(),
            reasoning,
            tuple(calls),
            response.reasoning_complete is False,
            tuple(malformed),
        )

    def drops_thinking(self, messages: Sequence[Message]) -> bool:
        """Whether the template drops the thinking of earlier turns once these messages follow."""
        if self.thinking_retention == "tool_cycle":
            return any(message["role"] == "user" for message in messages)
        return self.thinking_retention == "template"

    def _prepare(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
        prepared = list(messages)
        if self.family in _NAMED_RESULTS:
            prepared = with_tool_names([*before, *messages])[len(before) :]
        if self.family not in _DEVELOPERS:
            prepared = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in prepared
            ]
        return [map_text(message, self.tokenizer.guard) for message in prepared] if self._guards else prepared

    def _tools(self, tools: Sequence[Any]) -> list[Any] | None:
        if not tools:
            return None
        return list(map_text(tools, self.tokenizer.guard)) if self._guards else list(tools)


def _family_of(name: str, library: Any) -> str:
    known: Mapping[str, str] = library.base.MODEL_RENDERER_MAP
    if name not in known:
        raise ConfigError(
            f"no renderer is known for the tokenizer {name}: set the renderer's name, one of "
            f"{', '.join(sorted(set(known.values())))} (or custom, with import_path)"
        )
    return known[name]


def _arguments_text(arguments: Any) -> str | None:
    """Arguments as the Chat Completions API has them; None where JSON cannot say them."""
    if isinstance(arguments, str):
        return arguments
    try:
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return text


def load_renderer(config: ModelConfig) -> TokenRenderer | None:
    """The renderer of mode `tokens`, None in mode `chat`; raises `ConfigError` where it cannot be had."""
    if config.mode is not ModelMode.TOKENS or config.tokens is None:
        return None
    settings = config.tokens
    return TokenRenderer.load(
        settings.tokenizer,
        renderer=settings.renderer,
        options=settings.options,
        thinking_retention=settings.thinking_retention,
    )
