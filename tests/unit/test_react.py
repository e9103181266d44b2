"""The react agent shows the model what happened, whatever the model said or the command did."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpcroll.config import HarnessConfig
from hpcroll.contract import StopReason
from hpcroll.errors import SandboxError
from hpcroll.gateway import unfold_messages
from hpcroll.harnesses.react import ReactHarness
from hpcroll.harnesses.tools import show_result
from hpcroll.sandboxes.base import ExecResult
from hpcroll.testing.harness_suite import Stage, stage
from hpcroll.testing.policy_server import Behaviour, ToolCall, Turn, garbage, solves
from hpcroll.testing.policy_server.script import bash, submit
from hpcroll.trajectory import build


def play(root: Path, behaviour: Behaviour, **config: Any) -> tuple[StopReason, Stage, list[Any]]:
    """Runs the agent; its messages are those of the last request."""

    async def run() -> tuple[StopReason, Stage, list[Any]]:
        async with stage(root, behaviour) as there:
            reason = await ReactHarness(HarnessConfig(**config)).run(there.agent)
            await there.model.close()
            return reason, there, unfold_messages([call.call for call in there.model.calls])[-1]

    return asyncio.run(run())


def contents(messages: list[Any], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def test_output_errors_and_exit_status_are_shown(tmp_path: Path) -> None:
    _, there, messages = play(tmp_path, solves(["echo out; echo err >&2; exit 3"], "x"))
    assert contents(messages, "tool") == ["out\n[stderr]\nerr\n[exit status 3]"]
    assert there.agent.actions[0].exit_code == 3
    assert there.agent.actions[0].output_bytes == 8


def test_bytes_that_are_no_text_are_shown_and_harmless(tmp_path: Path) -> None:
    _, _, messages = play(tmp_path, solves([r"printf 'a\377\376b\000c'"], "x"))
    assert contents(messages, "tool") == ["a\ufffd\ufffdb\x00c\n[exit status 0]"]


def test_long_output_is_cut_in_the_middle_with_a_marker(tmp_path: Path) -> None:
    command = "printf begin; head -c 100000 /dev/zero | tr '\\0' x; printf end"
    _, there, messages = play(tmp_path, solves([command], "x"), output_bytes=256)
    (shown,) = contents(messages, "tool")
    assert shown.startswith("begin")
    assert shown.endswith("end\n[exit status 0]")
    assert "[... 99752 bytes left out ...]" in shown
    assert len(shown) < 400
    assert there.agent.actions[0].output_truncated


def test_command_that_times_out_is_shown_as_such_and_the_agent_goes_on(tmp_path: Path) -> None:
    reason, there, messages = play(
        tmp_path, solves(["echo begun; exec sleep 3600", "echo more"], "x"), command_timeout_s=0.3
    )
    assert reason is StopReason.SUBMITTED
    assert contents(messages, "tool") == ["begun\n[killed after 0.3 s]", "more\n[exit status 0]"]
    assert [action.timed_out for action in there.agent.actions] == [True, False, False]


def test_every_command_starts_in_the_work_directory(tmp_path: Path) -> None:
    _, there, messages = play(tmp_path, solves(["mkdir d; cd d; pwd", "pwd"], "x"))
    first, second = contents(messages, "tool")
    assert first.splitlines()[0] == f"{there.sandbox.workdir}/d"
    assert second.splitlines()[0] == there.sandbox.workdir
    assert there.sandbox.workdir in contents(messages, "system")[0]


def test_nonsense_is_corrected_and_counts_as_turns(tmp_path: Path) -> None:
    reason, there, messages = play(tmp_path, garbage())
    assert reason is StopReason.SUBMITTED
    assert len(there.model.calls) == 6
    tools = contents(messages, "tool")
    assert len(tools) == 4
    assert all(text.startswith("This call was not run: ") for text in tools)
    assert "not JSON" in tools[0]
    assert "no tool 'no_such_tool'" in tools[1]
    assert "had no tool call" in contents(messages, "user")[-1]
    assert [action.name for action in there.agent.actions] == ["submit"]


def test_several_calls_of_one_reply_are_run_in_order_until_it_submits(tmp_path: Path) -> None:
    turn = Turn(
        tools=(
            bash("echo a > f"),
            ToolCall(name="bash", arguments="{"),
            bash("cat f"),
            submit("y"),
            bash("rm f"),
        )
    )
    reason, there, _ = play(tmp_path, Behaviour(name="b", turns=(turn,)))
    assert reason is StopReason.SUBMITTED
    assert there.agent.answer == "y"
    assert [action.name for action in there.agent.actions] == ["bash", "bash", "submit"]
    assert {action.call_index for action in there.agent.actions} == {0}
    assert (tmp_path / "sandbox" / "f").read_text() == "a\n"


def test_reply_that_was_cut_short_is_told_so(tmp_path: Path) -> None:
    behaviour = Behaviour(name="b", turns=(Turn(text="word " * 8000), solves([], "z").turns[0]))
    reason, there, messages = play(tmp_path, behaviour)
    assert reason is StopReason.SUBMITTED
    assert there.model.calls[0].call.finish_reason == "length"
    assert "cut off" in contents(messages, "user")[-1]


def test_sandbox_that_dies_under_a_command_is_a_sandbox_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with stage(tmp_path, solves(["sleep 3600"], "x")) as there:
            original = there.sandbox.exec

            async def dies(argv: Any, **options: Any) -> ExecResult:
                result = await original(["true"], timeout_s=5.0)
                if argv[-1] != "sleep 3600":
                    return result
                await there.sandbox.stop()
                return ExecResult(-9, b"", b"", 0, 0, 0.0)

            there.sandbox.exec = dies  # type: ignore[method-assign,assignment]
            with pytest.raises(SandboxError, match=there.agent.rollout_id):
                await ReactHarness(HarnessConfig()).run(there.agent)
            assert len(there.agent.actions) == 1

    asyncio.run(run())


def test_signals_and_kills_are_told_apart() -> None:
    assert show_result(ExecResult(-11, b"", b"", 0, 0, 0.0), timeout_s=1) == "[killed by signal 11]"
    assert show_result(ExecResult(None, b"a\n", b"", 2, 0, 0.0, True), timeout_s=9) == "a\n[killed after 9 s]"


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="systemprompt"):
        ReactHarness(HarnessConfig(options={"systemprompt": "x"}))


def test_system_prompt_is_a_template_that_braces_do_not_break(tmp_path: Path) -> None:
    template = 'Work in {workdir}; write {"json": 1}; {command_timeout_s} s.'
    _, there, messages = play(tmp_path, solves([], "x"), options={"system_prompt": template})
    expected = f'Work in {there.sandbox.workdir}; write {{"json": 1}}; 60 s.'
    assert contents(messages, "system") == [expected]


@pytest.mark.parametrize("remember", [True, False])
def test_segments_built_from_the_record_are_what_the_server_sampled(tmp_path: Path, remember: bool) -> None:
    async def run() -> None:
        behaviour = solves(["echo naïve", "ls -la", "seq 50"], "42")
        async with stage(tmp_path, behaviour, remember=remember, noncanonical=1.0) as there:
            await ReactHarness(HarnessConfig()).run(there.agent)
            await there.model.close()
            built = build(there.model.calls)
            assert built.dropped == ()
            assert built.gaps == ()
            assert len(built.segments) == (1 if remember else 4)
            by_call = {span.call_index: span for span in built.call_spans}
            for index, sampled in enumerate(there.server.sampled):
                span = by_call[index]
                tokens = built.tokens[span.segment_index]
                stop = span.start + span.length
                assert tuple(tokens.ids[: span.start].tolist()) == sampled.prompt_ids
                assert tuple(tokens.ids[span.start : stop].tolist()) == sampled.sampled_ids
                assert tuple(tokens.logprobs[span.start : stop].tolist()) == sampled.logprobs
                assert tokens.sampled[span.start : stop].all()

    asyncio.run(run())
