"""One trajectory for people: what the agent said and did, what was sampled by whom, what it earned."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcroll.contract import Call, Segment, SegmentTokens, Trajectory

_LONGEST_TEXT = 2_000


def print_trajectory(trajectory: Trajectory, *, tokens: bool = False) -> None:
    """Prints outcome, segments, turns and timing; `tokens` adds every token of every segment."""
    console = Console()
    console.print(_facts(trajectory))
    console.print(_segments(trajectory))
    for call in trajectory.record.calls:
        for role, text in _turn(call):
            console.print(Text(f"[call {call.call_index}] {role}", style="bold"))
            console.print(Text(_cut(text)))
    if tokens:
        for segment, arrays in zip(trajectory.record.segments, trajectory.tokens, strict=True):
            console.print(Text(f"segment {segment.segment_index}", style="bold"))
            for line in token_lines(segment, arrays):
                print(line)


def _facts(trajectory: Trajectory) -> Table:
    record = trajectory.record
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    reward = "none" if record.reward is None else f"{record.reward:g}"
    table.add_row("rollout", f"{record.rollout_id} (group {record.group_id}, sample {record.sample_index})")
    table.add_row("task", Text(f"{record.task_id} ({record.handler}, {record.harness})"))
    table.add_row("ended", f"{record.status}, {record.stop_reason}, attempt {record.attempt}")
    table.add_row("reward", reward)
    if record.verdict is not None:
        table.add_row("verdict", Text(_verdict(trajectory)))
    if record.failure is not None:
        table.add_row("failure", Text(f"{record.failure.error}: {record.failure.message}"))
    trainable = "yes" if record.trainable else f"no: {'; '.join(record.not_trainable_because)}"
    table.add_row("trainable", Text(trainable))
    table.add_row("tokens", f"{sum(map(len, trajectory.tokens))}, {trajectory.action_tokens} sampled")
    table.add_row("calls", f"{len(record.calls)} model calls, {len(record.actions)} actions")
    table.add_row("time", _timing(trajectory))
    table.add_row("node", Text(f"{record.resources.node} {record.resources.slurm_job or ''}".strip()))
    for gap in record.gaps:
        table.add_row("gap", Text(gap))
    return table


def _verdict(trajectory: Trajectory) -> str:
    verdict = trajectory.record.verdict
    assert verdict is not None
    parts = [verdict.evaluator]
    if verdict.no_reward_because:
        parts.append(f"no reward because {verdict.no_reward_because}")
    if verdict.tests_passed or verdict.tests_failed:
        parts.append(f"{len(verdict.tests_passed)} tests passed, {len(verdict.tests_failed)} failed")
    parts += [f"{name} {value:g}" for name, value in verdict.components.items()]
    return ", ".join(part for part in parts if part)


def _timing(trajectory: Trajectory) -> str:
    timing = trajectory.record.timing
    stages = {"init": timing.init, "run": timing.run, "eval": timing.eval}
    return ", ".join(
        f"{name} {stage.duration_s:.2f} s" for name, stage in stages.items() if stage is not None
    )


def _segments(trajectory: Trajectory) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("segment", "role", "began", "parent", "tokens", "sampled", "trained", "policies"):
        table.add_column(name, justify="left" if name in ("role", "began", "policies") else "right")
    for segment, arrays in zip(trajectory.record.segments, trajectory.tokens, strict=True):
        parent = "-" if segment.parent is None else f"{segment.parent.segment_index}@{segment.parent.length}"
        counts = (len(arrays), int(arrays.sampled.sum()), int(arrays.loss_mask.sum()))
        began, role = segment.began.value, segment.role.value
        row = (segment.segment_index, role, began, parent, *counts, _policies(segment))
        table.add_row(*map(str, row))
    return table


def _policies(segment: Segment) -> str:
    names = []
    for run in segment.policy_runs:
        versions = (
            f"{run.version_low}"
            if run.version_low == run.version_high
            else f"{run.version_low}..{run.version_high}"
        )
        lineage = f"/{run.lineage}" if run.lineage else ""
        names.append(f"{run.policy_name}{lineage}@{versions}")
    return ", ".join(dict.fromkeys(names))


def _turn(call: Call) -> Iterator[tuple[str, str]]:
    for message in call.messages:
        if isinstance(message, dict):
            yield str(message.get("role", "message")), _content(message)
    if isinstance(call.reply, dict):
        yield "assistant", _content(call.reply)
    if call.error:
        yield "error", call.error


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content)] if content else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", {}) if isinstance(call, dict) else {}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return "\n".join(parts)


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    left_out = f"... {len(text) - _LONGEST_TEXT} characters left out (--json has them) ..."
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"


def token_lines(segment: Segment, arrays: SegmentTokens) -> Iterator[str]:
    """One line per token: position, id, who, loss mask, log-probability, policy versions."""
    versions = {}
    for run in segment.policy_runs:
        for position in range(run.start, run.start + run.length):
            versions[position] = f"{run.version_low}..{run.version_high}"
    for position in range(len(arrays)):
        logprob = float(arrays.logprobs[position])
        who = "sampled" if arrays.sampled[position] else "context"
        shown = "-" if math.isnan(logprob) else f"{logprob:.4f}"
        mask, version = int(arrays.loss_mask[position]), versions.get(position, "-")
        yield f"{position:6d} {int(arrays.ids[position]):8d} {who} {mask} {shown} {version}"
