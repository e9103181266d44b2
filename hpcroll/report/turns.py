"""A trajectory's calls as a conversation: what each request added, what came back, which tools ran."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from pydantic import JsonValue
from rich.text import Text

from hpcroll.contract import Action, Call, CallSpan, Trajectory

_LONGEST_TEXT = 2_000
_ROLE_STYLES = {
    "system": "bold blue",
    "developer": "bold blue",
    "user": "bold cyan",
    "assistant": "bold green",
    "tool": "bold yellow",
    "error": "bold red",
}


def turns(trajectory: Trajectory, *, call: int | None = None, segment: int | None = None) -> Iterator[Text]:
    """The lines of every call, of one call, or of those in one segment; long texts with their middle cut."""
    record = trajectory.record
    spans = {span.call_index: span for span in record.call_spans}
    dropped = {drop.call_index: drop.reason for drop in record.dropped}
    actions: dict[int | None, list[Action]] = {}
    for action in record.actions:
        actions.setdefault(action.call_index, []).append(action)
    for one in record.calls:
        span = spans.get(one.call_index)
        if call not in (None, one.call_index):
            continue
        if segment is not None and (span is None or span.segment_index != segment):
            continue
        yield _header(trajectory, one, span, dropped.get(one.call_index))
        yield from _messages(one)
        for action in actions.get(one.call_index, ()):
            yield _action(action)


def _header(trajectory: Trajectory, call: Call, span: CallSpan | None, dropped: str | None) -> Text:
    line = Text(f"call {call.call_index}", style="bold")
    parts = []
    if span is not None:
        mask = trajectory.tokens[span.segment_index].loss_mask[span.start : span.start + span.length]
        trained = "trained" if mask.any() else "not trained"
        parts.append(f"segment {span.segment_index} [{span.start}, {span.start + span.length})")
        parts.append(f"{span.length} tokens, {trained}")
    elif dropped is not None:
        parts.append(f"dropped: {dropped}")
    if call.policy is not None and span is not None:
        parts.append(policy_name(call.policy))
    if call.purpose != "main":
        parts.append(call.purpose)
    parts += [call.finish_reason or "", f"{call.latency.total_s:.2f} s"]
    if call.messages_from:
        parts.append(f"after {call.messages_from} messages of call {call.messages_base}")
    return line.append("  " + " · ".join(part for part in parts if part), style="dim")


def policy_name(policy: Any) -> str:
    """`name/lineage@low..high` of anything that has these fields."""
    low, high = policy.version_low, policy.version_high
    versions = f"{low}" if low == high else f"{low}..{high}"
    lineage = f"/{policy.lineage}" if policy.lineage else ""
    return f"{policy.policy_name}{lineage}@{versions}"


def _messages(call: Call) -> Iterator[Text]:
    for message in call.messages:
        yield from _message(message, "message")
    yield from _message(call.reply, "assistant")
    if call.error:
        yield _said("error", call.error)


def _message(message: JsonValue, role: str) -> Iterator[Text]:
    if not isinstance(message, dict):
        return
    role = str(message.get("role", role))
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        yield _said(role, _shown(thought), note=" thinks", style="italic dim")
    if content := message.get("content"):
        yield _said(role, _shown(content))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = _arguments(function.get("arguments"))
            yield _said(role, arguments, note=f" calls {clean(str(function.get('name')))}", style="magenta")


def _said(role: str, text: str, *, note: str = "", style: str = "") -> Text:
    said = Text(f"  {clean(role)}{note}", style=_ROLE_STYLES.get(role, "bold"))
    for line in _cut(clean(text)).splitlines():
        said.append(f"\n    {line}" if line else "\n", style=style or "none")
    return said


def _shown(content: JsonValue) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        str(part["text"]) if isinstance(part, dict) and "text" in part else json.dumps(part) for part in parts
    )


def _arguments(arguments: JsonValue) -> str:
    """One line per argument, texts as they are."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    if not isinstance(values, dict):
        return json.dumps(values, ensure_ascii=False)
    shown = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values.values()
    )
    return "\n".join(f"{name}: {value}" for name, value in zip(values, shown, strict=True))


def _action(action: Action) -> Text:
    parts = [f"{action.duration_s:.2f} s"]
    if action.timed_out:
        parts.append("timed out")
    elif action.exit_code is not None:
        parts.append(f"exit {action.exit_code}")
    parts.append(f"{action.output_bytes} bytes of output{', cut' if action.output_truncated else ''}")
    line = f"  action {clean(action.name)}: {', '.join(parts)}"
    return Text(line, style="red" if action.timed_out or action.exit_code else "dim")


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    left_out = f"... {len(text) - _LONGEST_TEXT} characters left out (--json has them) ..."
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"


def clean(text: str) -> str:
    """`text` without what would steer a terminal: an agent's output is nobody's command."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf") else f"\\x{ord(char):02x}"
        for char in text.replace("\r\n", "\n")
    )
