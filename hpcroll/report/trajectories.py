"""One trajectory for people: what the agent said and did, what was sampled by whom, what it earned."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hpcroll.contract import Segment, SegmentRole, Status, Trajectory
from hpcroll.errors import ConfigError
from hpcroll.report.token_view import Decoder, token_lines, token_view
from hpcroll.report.turns import clean, policy_name, turns
from hpcroll.trajectory import row_stats

_UNBOUNDED_COLUMNS = 10_000
_STATUS_STYLES = {
    Status.COMPLETED: "green",
    Status.TRUNCATED: "yellow",
    Status.FAILED: "red",
    Status.CANCELLED: "dim",
}
_ROLE_STYLES = {
    SegmentRole.MAIN: "bold green",
    SegmentRole.SUBAGENT: "bold cyan",
    SegmentRole.AUXILIARY: "bold yellow",
}


def print_trajectory(
    trajectory: Trajectory,
    *,
    tokens: bool = False,
    raw: bool = False,
    segment: int | None = None,
    call: int | None = None,
    decode: Decoder | None = None,
) -> None:
    """Prints what became of it, its segments as a tree, and its turns.

    `tokens` shows tokens in place of the turns, as ids or with `decode` as text, `raw` one line per token.
    `segment` and `call` show only that much. Raises `ConfigError` where there is no such segment or call.
    """
    record = trajectory.record
    _check(trajectory, segment, call)
    console = Console(highlight=False)
    if not console.is_terminal:
        # Nobody's window bounds a file or a pipe.
        console.width = _UNBOUNDED_COLUMNS
    if segment is None and call is None:
        if record.partial is not None:
            console.print(Panel.fit(Text(f"PARTIAL: {record.partial}"), style="bold red"))
        console.print(_facts(trajectory))
        console.print(_forest(trajectory))
    if raw:
        for one, arrays in zip(record.segments, trajectory.tokens, strict=True):
            if segment in (None, one.segment_index):
                print(f"segment {one.segment_index}")
                for line in token_lines(one, arrays):
                    print(line)
    elif tokens:
        for text in token_view(trajectory, segment=segment, call=call, decode=decode):
            console.print(text, soft_wrap=True)
    else:
        for text in turns(trajectory, segment=segment, call=call):
            console.print(text, soft_wrap=True)


def trajectory_json(trajectory: Trajectory, *, tokens: bool = False) -> dict[str, Any]:
    """The record as JSON values; with `tokens`, the arrays of each segment, too (NaN as null)."""
    shown = trajectory.record.model_dump(mode="json")
    if tokens:
        shown["tokens"] = [
            {
                "ids": arrays.ids.tolist(),
                "sampled": arrays.sampled.tolist(),
                "loss_mask": arrays.loss_mask.tolist(),
                "logprobs": [None if np.isnan(value) else value for value in arrays.logprobs.tolist()],
            }
            for arrays in trajectory.tokens
        ]
    return shown


def _check(trajectory: Trajectory, segment: int | None, call: int | None) -> None:
    record = trajectory.record
    if segment is not None and not 0 <= segment < len(record.segments):
        raise ConfigError(
            f"rollout {record.rollout_id} has {len(record.segments)} segments, none is {segment}"
        )
    if call is not None and call not in {one.call_index for one in record.calls}:
        raise ConfigError(f"rollout {record.rollout_id} has {len(record.calls)} calls, none is {call}")


def _facts(trajectory: Trajectory) -> Table:
    record = trajectory.record
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    reward = "none" if record.reward is None else f"{record.reward:g}"
    table.add_row("rollout", f"{record.rollout_id} (group {record.group_id}, sample {record.sample_index})")
    table.add_row("task", Text(f"{record.task_id} ({record.handler}, {record.harness})"))
    ended = f"{record.status}, {record.stop_reason}, attempt {record.attempt}"
    if record.partial is None:
        table.add_row("ended", Text(ended, style=_STATUS_STYLES[record.status]))
    table.add_row("reward", reward)
    if record.verdict is not None:
        table.add_row("verdict", Text(clean(_verdict(trajectory))))
    if record.failure is not None:
        table.add_row("failure", Text(clean(f"{record.failure.error}: {record.failure.message}")))
    trainable = "yes" if record.trainable else f"no: {'; '.join(record.not_trainable_because)}"
    table.add_row("trainable", Text(clean(trainable)))
    rows = row_stats(trajectory)
    table.add_row(
        "tokens",
        f"{rows.stored_tokens} in the segments, {rows.distinct_tokens} of them distinct, "
        f"{rows.sampled_tokens} sampled, {rows.trained_tokens} trained, {rows.dropped_tokens} dropped",
    )
    table.add_row("rows", f"{rows.merged_rows} to train on, {rows.call_rows} with one for each call")
    table.add_row("calls", f"{len(record.calls)} model calls, {len(record.actions)} actions")
    if timing := _timing(trajectory):
        table.add_row("time", timing)
    if record.resources.node:
        table.add_row("node", Text(f"{record.resources.node} {record.resources.slurm_job or ''}".strip()))
    for drop in record.dropped:
        text = f"{drop.length} tokens of call {drop.call_index}: {drop.reason}"
        table.add_row("dropped", Text(clean(text), style="yellow"))
    for gap in record.gaps:
        table.add_row("gap", Text(clean(gap), style="yellow"))
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


def _forest(trajectory: Trajectory) -> Tree:
    """Segments beneath the one that they fork from."""
    forest = Tree(Text("segments", style="bold"), guide_style="dim")
    nodes: dict[int | None, Tree] = {None: forest}
    for segment, arrays in zip(trajectory.record.segments, trajectory.tokens, strict=True):
        parent = segment.parent
        line = Text(f"{segment.segment_index} ").append(segment.role, style=_ROLE_STYLES[segment.role])
        line.append(f"  {segment.began}" + (f" at {parent.length}" if parent is not None else ""))
        line.append(f" -> {segment.ended}" if segment.ended else "")
        sampled, trained = int(arrays.sampled.sum()), int(arrays.loss_mask.sum())
        line.append(f"  {len(arrays)} tokens, {sampled} sampled, {trained} trained")
        line.append(f"  weight {segment.weight:.3g}  {_policies(segment)}", style="dim")
        source = parent.segment_index if parent is not None else None
        nodes[segment.segment_index] = nodes[source].add(line)
    return forest


def _policies(segment: Segment) -> str:
    """Policies in order, each once: a change of version shows."""
    return ", ".join(dict.fromkeys(policy_name(run) for run in segment.policy_runs))
