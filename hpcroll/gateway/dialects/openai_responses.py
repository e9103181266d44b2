"""OpenAI Responses: https://platform.openai.com/docs/api-reference/responses.

Nothing is stored between requests: agents send the whole conversation (`store: false`).
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hpcroll.gateway.arguments import TEXT_ARGUMENT
from hpcroll.gateway.chat import ChatRequest, Delta, Message, Reply
from hpcroll.gateway.dialects.base import SSE, Caller, HttpCall
from hpcroll.gateway.dialects.openai_chat import openai_error
from hpcroll.gateway.dialects.openai_responses_shape import BODY
from hpcroll.gateway.dialects.openai_responses_tools import Tools
from hpcroll.gateway.dialects.sampling import read_sampling
from hpcroll.gateway.dialects.shape import check
from hpcroll.gateway.refusal import Refusal, bad_request

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
_STORED = ("previous_response_id", "conversation", "prompt", "background")
"""What only a server that stores responses can do."""


class OpenAIResponses:
    """`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

    name: ClassVar[str] = "openai_responses"
    calls: ClassVar[tuple[str, ...]] = ("/v1/responses",)
    counts: ClassVar[tuple[str, ...]] = ("/v1/responses/input_tokens",)

    def __init__(self, model: str) -> None:
        self._model = model

    def read(self, call: HttpCall) -> Caller:
        request, tools = read_request(call.body)
        encrypted = "reasoning.encrypted_content" in (call.body.get("include") or ())
        return _ResponsesCaller(request, tools, call.body, model=self._model, encrypted=encrypted)

    def read_count(self, call: HttpCall) -> ChatRequest:
        return read_request(call.body)[0]

    def count(self, tokens: int) -> Mapping[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def refusal(self, refusal: Refusal) -> Mapping[str, Any]:
        return openai_error(refusal)

    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        return {}


def read_request(body: Mapping[str, Any]) -> tuple[ChatRequest, Tools]:
    """The request in `body` and its tools; raises `Refusal` that names what is wrong or not supported."""
    for name in _STORED:
        if body.get(name):
            raise bad_request(
                f"{name}: not supported, nothing is stored between requests; send the whole input",
                code="unsupported",
                param=name,
            )
    check(body, BODY)
    tools = Tools(body.get("tools") or ())
    sent = body["input"]
    conversation = _Conversation(tools)
    if instructions := body.get("instructions"):
        conversation.say("system", instructions)
    for item in [{"role": "user", "content": sent}] if isinstance(sent, str) else sent:
        conversation.add(item)
    passed_on, constraints = _choice(body.get("tool_choice"))
    if body.get("parallel_tool_calls") is False:
        passed_on["parallel_tool_calls"] = False
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type", "text") == "json_schema":
        schema = {name: form[name] for name in ("name", "schema", "strict") if name in form}
        constraints["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form.get("type", "text") != "text":
        constraints["response_format"] = form
    request = ChatRequest(
        messages=tuple(conversation.messages()),
        stream=bool(body.get("stream")),
        tools=tuple(tools.functions),
        asked=read_sampling(body, _SAMPLING),
        constraints=constraints,
        passed_on=passed_on,
    )
    return request, tools


def _choice(choice: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is passed on, and what constrains sampling, of a `tool_choice`."""
    if choice in (None, "auto"):
        return {}, {}
    if choice == "none":
        return {"tool_choice": "none"}, {}
    if choice == "required":
        return {}, {"tool_choice": "required"}
    if choice["type"] not in ("function", "custom") or not choice.get("name"):
        message = f"tool_choice of type {choice['type']!r} is not supported: only that of one function is"
        raise bad_request(message, code="unsupported", param="tool_choice")
    return {}, {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}


class _Conversation:
    """Items as messages. What one reply said stands in several items, and becomes one message again."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._messages: list[dict[str, Any]] = []
        self._reply: dict[str, Any] | None = None
        """The assistant message that items still join; none once something else came."""
        self._reply_id = ""
        """Of the reply that it was, where its items were given an id here."""

    def messages(self) -> list[Message]:
        return self._messages

    def say(self, role: str, text: str) -> None:
        self._reply = None
        self._messages.append({"role": role, "content": text})

    def add(self, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._think(item)
        elif kind == "function_call":
            self._call(item, item["arguments"])
        elif kind == "custom_tool_call":
            self._call(item, json.dumps({TEXT_ARGUMENT: item["input"]}, ensure_ascii=False))
        else:
            self._reply = None
            output = _text(item["output"])
            self._messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})

    def _message(self, item: Mapping[str, Any]) -> None:
        role, text = item["role"], _text(item.get("content"))
        if role == "assistant":
            reply = self._assistant("content", item)
            reply["content"] = (reply["content"] or "") + text or None
        else:
            self.say("system" if role == "developer" else role, text)

    def _think(self, item: Mapping[str, Any]) -> None:
        # The sealed text is whole; a summary is what is left where an agent dropped it.
        text = unseal(item.get("encrypted_content"))
        if text is None:
            text = _text(item.get("content") or item.get("summary"))
        reply = self._assistant("reasoning_content", item)
        if text:
            reply["reasoning_content"] = reply.get("reasoning_content", "") + text

    def _call(self, item: Mapping[str, Any], arguments: str) -> None:
        function = {"name": self._tools.function_name(item), "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._assistant("tool_calls", item).setdefault("tool_calls", []).append(call)

    def _assistant(self, part: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """The message that a part of a reply belongs to.

        Where no id tells, thoughts come first, then text, then calls.
        """
        reply, reply_id = self._reply, _reply_id(item)
        known = reply_id and reply_id == self._reply_id
        begins = reply is None or (
            not known and part != "tool_calls" and ("tool_calls" in reply or part == "reasoning_content")
        )
        if begins or reply is None:
            self._reply_id = reply_id
            reply = self._reply = {"role": "assistant", "content": None}
            self._messages.append(reply)
        return reply


def _reply_id(item: Mapping[str, Any]) -> str:
    """Of the reply that an item was part of; items of one reply have the same but for kind and number."""
    return str(item.get("id") or "").partition("_")[2].partition("_")[0]


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def seal(text: str) -> str:
    """Reasoning as the opaque text that agents carry from reply to request."""
    return base64.b64encode(text.encode()).decode()


def unseal(sealed: Any) -> str | None:
    """The inverse of `seal`; None for what is not sealed here."""
    try:
        return base64.b64decode(sealed, validate=True).decode() if isinstance(sealed, str) else None
    except ValueError:
        return None


class _ResponsesCaller:
    content_type = SSE

    def __init__(
        self,
        request: ChatRequest,
        tools: Tools,
        body: Mapping[str, Any],
        *,
        model: str,
        encrypted: bool,
    ) -> None:
        self.request = request
        self._tools = tools
        self._encrypted = encrypted
        self._id = uuid.uuid4().hex
        self._head = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.get("instructions"),
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "store": False,
        }
        self._events = 0
        self._done: list[dict[str, Any]] = []
        """Items that were streamed whole."""
        self._open: _OpenItem | None = None

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        return self._response(reply, self._output(reply))

    def _output(self, reply: Reply) -> list[dict[str, Any]]:
        output = []
        if reply.reasoning:
            output.append(self._reasoning(reply.reasoning, 0))
        if reply.content:
            output.append(self._message(reply.content, "completed", len(output)))
        return output + [self._tools.item(call, "completed") for call in reply.tool_calls]

    def opening(self, prompt_tokens: int) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None, "error": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        events = []
        if delta.reasoning:
            events += [self._begin("reasoning"), self._add("response.reasoning_text.delta", delta.reasoning)]
        if delta.content:
            events.append(self._begin("message"))
            events.append(self._add("response.output_text.delta", delta.content, logprobs=[]))
        # Calls follow whole, in the closing: an agent acts upon them only once the call is recorded.
        return b"".join(events)

    def closing(self, reply: Reply) -> bytes:
        events = [self._end()]
        for call in reply.tool_calls:
            events.append(self._whole_call(call))
        response = self._response(reply, self._done)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return b"".join([*events, self._event(kind, response=response)])

    def broken(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code, "message": refusal.message}
        response = {**self._head, "status": "failed", "output": [], "usage": None, "error": error}
        return self._event("response.failed", response=response)

    def _response(self, reply: Reply, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        cut = reply.finish_reason == "length"
        prompt, completion = reply.prompt_tokens, reply.completion_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage,
            "error": None,
        }

    def _message(self, text: str, status: str, index: int) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        content = [part] if status == "completed" else []
        return {
            "type": "message",
            "id": f"msg_{self._id}_{index}",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _reasoning(self, text: str, index: int, *, done: bool = True) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{self._id}_{index}", "summary": []}
        item["content"] = [{"type": "reasoning_text", "text": text}] if done else []
        if self._encrypted:
            item["encrypted_content"] = seal(text) if done else ""
        return item

    def _begin(self, kind: str) -> bytes:
        if self._open is not None and self._open.kind == kind:
            return b""
        events = [self._end()]
        index = len(self._done)
        item = (
            self._reasoning("", index, done=False)
            if kind == "reasoning"
            else self._message("", "in_progress", index)
        )
        self._open = _OpenItem(kind, index, item["id"])
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._event("response.content_part.added", **self._open.place(), part=part))
        return b"".join(events)

    def _add(self, kind: str, text: str, **further: Any) -> bytes:
        assert self._open is not None
        self._open.text += text
        return self._event(kind, **self._open.place(), delta=text, **further)

    def _end(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if item.kind == "reasoning":
            done = self._reasoning(item.text, item.index)
            events = [self._event("response.reasoning_text.done", **item.place(), text=item.text)]
        else:
            done = self._message(item.text, "completed", item.index)
            part = done["content"][0]
            events = [
                self._event("response.output_text.done", **item.place(), text=item.text, logprobs=[]),
                self._event("response.content_part.done", **item.place(), part=part),
            ]
        self._done.append(done)
        events.append(self._event("response.output_item.done", output_index=item.index, item=done))
        return b"".join(events)

    def _whole_call(self, call: Mapping[str, Any]) -> bytes:
        index = len(self._done)
        done = self._tools.item(call, "completed")
        self._done.append(done)
        text_field = "input" if done["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if text_field == "input" else "function_call_arguments"
        added = {**done, text_field: "", "status": "in_progress"}
        place = {"output_index": index, "item_id": done["id"]}
        text = done[text_field]
        return b"".join(
            (
                self._event("response.output_item.added", output_index=index, item=added),
                self._event(f"response.{kind}.delta", **place, delta=text),
                self._event(f"response.{kind}.done", **place, **{text_field: text}, name=done["name"]),
                self._event("response.output_item.done", output_index=index, item=done),
            )
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        data = {"type": kind, "sequence_number": number, **fields}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


class _OpenItem:
    def __init__(self, kind: str, index: int, item_id: str) -> None:
        self.kind = kind
        self.text = ""
        self.index = index
        self._item_id = item_id

    def place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": self.index, "content_index": 0}
