"""The steps of an ATIF trajectory, from calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpcroll.contract import Call, CallSpan, SegmentTokens
from hpcroll.exporters.conversation import Message, new_messages, text_of, thought_of, tool_calls_of

_SOURCES = {"system": "system", "developer": "system", "user": "user"}


class StepBuilder:
    """Turns the calls of one line into steps, each message once."""

    def __init__(self, tokens: Sequence[SegmentTokens], *, prompt_ids: bool) -> None:
        self._tokens = tokens
        self._prompt_ids = prompt_ids
        self._steps: list[dict[str, Any]] = []
        self._before: list[Message] = []
        self._prompt_total = self._completion_total = 0

    def add(self, call: Call, request: Sequence[Message], span: CallSpan | None, moment: str) -> None:
        """Appends what `call` added: the new messages of its request, and its reply."""
        for message in new_messages(request, self._before):
            self._add_message(message)
        reply: Message = {"role": "assistant", **(call.reply if isinstance(call.reply, dict) else {})}
        self._before = [*request, reply]
        step = self._agent_step(reply)
        step |= {
            "timestamp": moment,
            "model_name": call.model_name,
            "llm_call_count": 1,
            "metrics": self._metrics(call, span),
            "extra": _facts(call, span),
        }
        self._steps.append(step)

    def steps(self) -> list[dict[str, Any]]:
        """At least one: ATIF knows no empty trajectory."""
        steps = self._steps or [{"source": "system", "message": "(no model call was made)"}]
        return [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]

    def totals(self) -> dict[str, Any]:
        return {
            "total_prompt_tokens": self._prompt_total,
            "total_completion_tokens": self._completion_total,
            "total_steps": max(len(self._steps), 1),
        }

    def _add_message(self, message: Message) -> None:
        role = str(message.get("role"))
        if role == "tool":
            self._add_observation(message)
        elif role == "assistant":
            # A past that the agent rewrote: nobody sampled it here.
            step = self._agent_step(message)
            step.pop("reasoning_content", None)
            self._steps.append({**step, "is_copied_context": True, "llm_call_count": 0})
        else:
            source = _SOURCES.get(role, "user")
            self._steps.append({"source": source, "message": text_of(message.get("content"))})

    def _add_observation(self, message: Message) -> None:
        result: dict[str, Any] = {"content": text_of(message.get("content"))}
        wanted = message.get("tool_call_id")
        for step in reversed(self._steps):
            if any(call["tool_call_id"] == wanted for call in step.get("tool_calls", ())):
                result["source_call_id"] = wanted
                step.setdefault("observation", {"results": []})["results"].append(result)
                return
        self._steps.append({"source": "user", "message": "", "observation": {"results": [result]}})

    def _agent_step(self, message: Message) -> dict[str, Any]:
        step: dict[str, Any] = {"source": "agent", "message": text_of(message.get("content"))}
        if thought := thought_of(message):
            step["reasoning_content"] = thought
        calls = [
            {"tool_call_id": call_id, "function_name": name, "arguments": _arguments(arguments)}
            for call_id, name, arguments in tool_calls_of(message)
        ]
        return {**step, "tool_calls": calls} if calls else step

    def _metrics(self, call: Call, span: CallSpan | None) -> dict[str, Any]:
        self._prompt_total += call.usage.prompt_counted
        self._completion_total += call.usage.completion_counted
        metrics: dict[str, Any] = {
            "prompt_tokens": call.usage.prompt_counted,
            "completion_tokens": call.usage.completion_counted,
        }
        if span is not None:
            tokens, end = self._tokens[span.segment_index], span.start + span.length
            metrics["completion_token_ids"] = tokens.ids[span.start : end].tolist()
            metrics["logprobs"] = tokens.logprobs[span.start : end].tolist()
            metrics["extra"] = {"loss_mask": tokens.loss_mask[span.start : end].tolist()}
            if self._prompt_ids:
                metrics["prompt_token_ids"] = tokens.ids[: span.start].tolist()
        return metrics


def _facts(call: Call, span: CallSpan | None) -> dict[str, Any]:
    """What hpcroll knows of a call and ATIF has no field for."""
    kept = call.model_dump(mode="json", exclude={"messages", "reply"})
    return {"call": kept, "span": span.model_dump(mode="json") if span is not None else None}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object, which ATIF wants; text that is none under a name that says so."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {"unparsed_arguments": text}
    return value if isinstance(value, dict) else {"unparsed_arguments": text}
