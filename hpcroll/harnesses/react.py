"""The built-in agent: think, run a command, look, and submit."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import Field

from hpcroll.config import HarnessConfig, Strict
from hpcroll.contract import Action, StopReason, sha256_hex
from hpcroll.errors import SandboxError
from hpcroll.harnesses.base import AgentSession
from hpcroll.harnesses.chat import ChatClient, LimitReachedError
from hpcroll.harnesses.tools import BASH, SUBMIT, TOOLS, BadCallError, read_call, show_result
from hpcroll.sandboxes.base import ExecResult

_SYSTEM = """\
You solve a task with a shell. Call one of your tools in every reply:
- bash: runs a command in {workdir}. Each command starts anew there: a changed directory or variable does \
not last. It may take {command_timeout_s:g} seconds and gets no input.
- submit: hands in your answer and ends the work. Where the task asks for changes and not for an answer, \
submit an empty one when they are done."""

_NO_CALL = "Your reply had no tool call. Call bash to go on, or submit to hand in your answer."
_CUT_SHORT = "Your reply was cut off at the longest that a reply may be. Be briefer, and call a tool."


class ReactOptions(Strict):
    """Options of the `react` harness."""

    system_prompt: str = Field(default=_SYSTEM, min_length=1)
    """Template of the system message; `{workdir}` and `{command_timeout_s}` are filled in."""


class ReactHarness:
    """A loop of model calls with the tools `bash` and `submit`, outside of the sandbox.

    A reply without a usable tool call is answered with what was wrong with it and counts as a turn.
    """

    Options: ClassVar[type[Strict]] = ReactOptions
    name: ClassVar[str] = "react"
    version: str = "1"
    inside: ClassVar[bool] = False

    def __init__(self, config: HarnessConfig) -> None:
        self._config = config
        self._options = ReactOptions.model_validate(config.options)

    async def run(self, session: AgentSession) -> StopReason:
        """Runs until the agent submits or a limit is met; see `Harness.run` for what it raises."""
        async with ChatClient(session.endpoint, tools=TOOLS) as chat:
            return await _Agent(session, chat, self._config, self._options).run()


class _Agent:
    def __init__(
        self, session: AgentSession, chat: ChatClient, config: HarnessConfig, options: ReactOptions
    ) -> None:
        self._session = session
        self._chat = chat
        self._config = config
        self._started = time.monotonic()
        self._shell = "sh"
        system = options.system_prompt.replace("{workdir}", session.sandbox.workdir)
        system = system.replace("{command_timeout_s:g}", f"{config.command_timeout_s:g}")
        system = system.replace("{command_timeout_s}", f"{config.command_timeout_s:g}")
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": session.prompt},
        ]

    async def run(self) -> StopReason:
        probe = await self._session.sandbox.exec(["sh", "-c", "command -v bash"], timeout_s=60.0)
        self._shell = "bash" if probe.exit_code == 0 else "sh"
        for turn in range(self._config.max_turns):
            try:
                message, finish_reason = await self._chat.complete(self._messages)
            except LimitReachedError as reached:
                return reached.limit
            self._messages.append(message)
            if await self._act(message, finish_reason, turn):
                return StopReason.SUBMITTED
        return StopReason.TURN_LIMIT

    async def _act(self, message: dict[str, Any], finish_reason: str | None, turn: int) -> bool:
        """Answers every tool call of a reply; True once the agent submitted."""
        calls = message.get("tool_calls") or []
        for call in calls:
            try:
                name, argument = read_call(call)
            except BadCallError as error:
                self._answer(call, f"This call was not run: {error}")
                continue
            if name == SUBMIT:
                self._session.answer = argument
                self._record(turn, name, argument, started=time.monotonic(), result=None)
                return True
            assert name == BASH
            self._answer(call, await self._run(turn, argument))
        if not calls:
            correction = _CUT_SHORT if finish_reason == "length" else _NO_CALL
            self._messages.append({"role": "user", "content": correction})
        return False

    async def _run(self, turn: int, command: str) -> str:
        started = time.monotonic()
        sandbox = self._session.sandbox
        result = await sandbox.exec(
            [self._shell, "-c", command],
            timeout_s=self._config.command_timeout_s,
            output_bytes=self._config.output_bytes,
        )
        self._record(turn, BASH, command, started=started, result=result)
        # A payload that kills what it runs in looks like any killed command; the sandbox knows better.
        if (result.exit_code is None or result.exit_code < 0) and not await sandbox.alive():
            raise SandboxError(f"rollout {self._session.rollout_id}: the sandbox died under a command")
        return show_result(result, timeout_s=self._config.command_timeout_s)

    def _answer(self, call: Any, content: str) -> None:
        call_id = call.get("id", "") if isinstance(call, dict) else ""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _record(
        self, turn: int, name: str, argument: str, *, started: float, result: ExecResult | None
    ) -> None:
        action = Action(
            call_index=self._chat.calls - 1,
            name=name,
            argument_sha256=sha256_hex(argument.encode()),
            started_s=started - self._started,
            duration_s=time.monotonic() - started,
            exit_code=result.exit_code if result is not None else None,
            timed_out=result.timed_out if result is not None else False,
            output_bytes=result.stdout_bytes + result.stderr_bytes if result is not None else 0,
            output_truncated=result.truncated if result is not None else False,
        )
        self._session.actions.append(action)
