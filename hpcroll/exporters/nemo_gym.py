"""NeMo Gym: the lines of its rollout collection, with token ids for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hpcroll.config import Strict
from hpcroll.contract import Call, CallSpan
from hpcroll.exporters.base import Fact
from hpcroll.exporters.conversation import (
    Message,
    new_messages,
    spans_of,
    text_of,
    thought_of,
    tool_calls_of,
    whole_requests,
    whole_text,
)
from hpcroll.exporters.json_text import json_text
from hpcroll.exporters.row_exporter import RowExporter, TrainingOptions
from hpcroll.exporters.rows import Row, stable_number
from hpcroll.exporters.tensors import describe_row
from hpcroll.shards import Column

_ROLES = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}


class NemoGymOptions(TrainingOptions):
    """Options of the format `nemo-gym`. NeMo Gym's trainers make their own advantages."""


class NemoGym(RowExporter):
    """`part-<number>.jsonl`: a line per trained segment, as `gym` collects rollouts.

    `responses_create_params.input` is the first call's request, `response.output` what followed. The last
    item of each reply that is trained on has `prompt_token_ids`, `generation_token_ids` and
    `generation_log_probs` (of the generation alone); each prompt begins with all tokens before it.
    `_ng_task_index` is a number that stands for the group, `_ng_rollout_index` the sample's index; a rollout
    with several trained segments has as many lines. `hpcroll` says what a line is of.
    """

    Options: ClassVar[type[Strict]] = NemoGymOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        Fact.CONTEXT_ROLES,
        Fact.SEGMENTS,
        Fact.UNTRAINED,
        Fact.SAMPLED,
        Fact.VERSIONS,
        Fact.VERSION_RANGES,
        Fact.SAMPLING,
        Fact.LOGPROB_KIND,
        Fact.VERDICT,
        Fact.IDENTITY,
        Fact.CALLS,
        Fact.ACTIONS,
        Fact.TIMING,
    )
    source: ClassVar[str] = (
        "nemo-gym 0.4.0 (NVIDIA-NeMo/Gym): nemo_gym/base_resources_server.py (BaseVerifyResponse), "
        "nemo_gym/openai_utils.py, nemo_gym/rollout_collection.py; read by nemo_rl/environments/nemo_gym.py"
    )
    columns: ClassVar[frozenset[Column]] = frozenset(Column)
    name_format: ClassVar[str] = "part-{number:05d}.jsonl"

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        return "".join(f"{json_text(_line(row))}\n" for row in rows).encode()


def _line(row: Row) -> dict[str, Any]:
    record = row.rollout.record
    requests = whole_requests(record.calls)
    calls = {call.call_index: call for call in record.calls}
    spans = spans_of(record, row.segment_index)
    first = calls[spans[0].call_index]
    output: list[dict[str, Any]] = []
    before: list[Message] = requests[first.call_index]
    for span in spans:
        call = calls[span.call_index]
        for message in new_messages(requests[call.call_index], before):
            output += _items(message, f"msg_{call.call_index}_{len(output)}")
        output += _reply(row, span, call)
        before = [*requests[call.call_index], _message(call)]
    line = {
        "responses_create_params": {
            "input": [_easy(message) for message in requests[first.call_index]],
            "model": first.model_name,
            "temperature": first.sampling_effective.temperature,
            "top_p": first.sampling_effective.top_p,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
        "response": {
            "id": f"{row.rollout.rollout_id}.{row.segment_index}",
            "created_at": first.started_at,
            "model": first.model_name,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
        "reward": row.reward,
        "_ng_task_index": stable_number(row.rollout.group_id),
        "_ng_rollout_index": row.rollout.summary.sample_index,
        "agent_ref": {"type": "responses_api_agents", "name": record.harness},
        "hpcroll": describe_row(row),
    }
    whole: dict[str, Any] = whole_text(line)
    return whole


def _reply(row: Row, span: CallSpan, call: Call) -> list[dict[str, Any]]:
    items = _items(_message(call), f"msg_{call.call_index}")
    if not items:
        items = [_output_message("", f"msg_{call.call_index}")]
    end = span.start + span.length
    if row.tokens.loss_mask[span.start : end].any():
        items[-1] |= {
            "prompt_token_ids": row.tokens.ids[: span.start].tolist(),
            "generation_token_ids": row.tokens.ids[span.start : end].tolist(),
            "generation_log_probs": row.tokens.logprobs[span.start : end].tolist(),
        }
    return items


def _message(call: Call) -> Message:
    reply = call.reply if isinstance(call.reply, dict) else {}
    return {"role": "assistant", **reply}


def _items(message: Message, item_id: str) -> list[dict[str, Any]]:
    """A chat message as items of the Responses API."""
    if message.get("role") == "tool":
        call_id = str(message.get("tool_call_id") or "")
        output = text_of(message.get("content"))
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    if message.get("role") != "assistant":
        return [_easy(message)]
    items: list[dict[str, Any]] = []
    if thought := thought_of(message):
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"{item_id}_r", "summary": summary})
    if content := text_of(message.get("content")):
        items.append(_output_message(content, item_id))
    for call_id, name, arguments in tool_calls_of(message):
        items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
    return items


def _output_message(text: str, item_id: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _easy(message: Message) -> dict[str, Any]:
    role = _ROLES.get(str(message.get("role")), "user")
    return {"type": "message", "role": role, "content": text_of(message.get("content"))}
