"""Training rows of real agents over thirty turns with thinking: one row per call, and merged ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcroll.trajectory import RowStats, row_stats
from tests.agent_runs import assert_solved, roll_out
from tests.agents import AGENTS, work
from tests.capabilities import need

pytestmark = [pytest.mark.full, pytest.mark.apptainer, pytest.mark.timeout(3000)]

ROUNDS = 21
"""Turns beside the nine that solve the task."""


@pytest.mark.parametrize("name", AGENTS)
def test_thirty_turns_are_a_fifth_of_the_rows_where_ids_are_kept(
    name: str, tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need(f"agent:{name}")
    chat, _ = _rows(name, tmp_path, serve_scripts)
    # A user message in the middle makes the template drop thinking, which is a fork of its own: see below.
    retention = "all" if AGENTS[name].insists else None
    tokens, _ = _rows(name, tmp_path, serve_scripts, mode="tokens", retention=retention)
    # A reply tokenised otherwise than its text comes back in other ids: each of them forks.
    assert chat.merged_rows > tokens.merged_rows
    assert tokens.call_rows >= 5 * tokens.merged_rows
    assert tokens.merged_row_tokens <= 1.15 * tokens.distinct_tokens


def test_thinking_that_the_template_drops_forks_once(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need("agent:mini_swe_agent")
    stats, rendered = _rows("mini_swe_agent", tmp_path, serve_scripts, mode="tokens")
    assert rendered == {"start": 1, "thinking_dropped": 1}
    assert stats.merged_rows == 2
    assert stats.call_rows == 31


def _rows(
    name: str,
    root: Path,
    serve_scripts: Callable[..., str],
    *,
    mode: str = "chat",
    retention: str | None = None,
) -> tuple[RowStats, Counter[str]]:
    """The rows of one session, and why the gateway did not go on from an earlier call's ids."""
    agent = AGENTS[name]
    folder = root / mode
    folder.mkdir()
    behaviour = work(agent, rounds=ROUNDS)
    done = roll_out(agent, behaviour, folder, serve_scripts, mode=mode, retention=retention)
    assert_solved(agent, done)
    stats = row_stats(done.trajectory)
    assert stats.call_rows >= 30
    rendered = Counter(
        recorded.call.rendering.why or recorded.call.rendering.how
        for recorded in done.calls
        if recorded.call.rendering is not None and recorded.call.rendering.how != "bridged"
    )
    print(
        f"\nagent={name} mode={mode} retention={retention} calls={stats.calls}"
        f" call_rows={stats.call_rows} rows={stats.merged_rows}"
        f" call_row_tokens={stats.call_row_tokens} row_tokens={stats.merged_row_tokens}"
        f" distinct={stats.distinct_tokens} began={dict(stats.began)} rendered={dict(rendered)}"
    )
    return stats, rendered
