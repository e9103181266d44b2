"""Runs agent programs that know nothing of hpcroll: inside the sandbox, with a base URL as their model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import Field

from hpcroll.config import HarnessConfig, Strict
from hpcroll.contract import Action, StopReason, canonical_json, sha256_hex
from hpcroll.errors import HarnessError, SandboxError
from hpcroll.harnesses.base import AgentSession
from hpcroll.harnesses.programs.base import MACHINE, TREE, Answer, Program, content, fill_text
from hpcroll.harnesses.trees import node, store
from hpcroll.sandboxes.base import ExecResult

_log = logging.getLogger(__name__)

_FOREVER_S = 30 * 86_400.0
"""The worker's deadline comes first."""
_PROBE_S = 60.0
_POLL_S = 0.5
_RETRY_S = 300.0
"""How long a program may try again after a model call that failed; a call that succeeds ends it."""
_OUTPUT_BYTES = 256 << 10
_TAIL_CHARS = 1500


class BlackBoxOptions(Strict):
    """`harness.options` of every black-box harness."""

    version: str | None = None
    """Another version than the one that hpcroll was tried with."""
    store: Path | None = None
    """Where `hpcroll agents install` put it, absolute; the user's own store where absent."""
    args: tuple[str, ...] = ()
    """Further arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    grace_s: float = Field(default=30.0, ge=0)
    """Seconds that the program may go on for after the gateway refused it for good."""


class BlackBoxHarness:
    """Runs `program` in the sandbox; a subclass that names its program is a harness.

    The program's exit ends the rollout. Where the gateway refused its last call, that limit or error
    says how, whatever the program made of it; else one of its codes of success is `exited`, and any other
    code, or no model call at all, is a `HarnessError` with its last words. Its output is the answer where
    it has one.
    """

    Options: ClassVar[type[Strict]] = BlackBoxOptions
    name: ClassVar[str]
    inside: ClassVar[bool] = True
    program: Program

    def __init__(self, config: HarnessConfig) -> None:
        self._config = config
        self._options = cast(BlackBoxOptions, self.Options.model_validate(config.options))
        self.version = self._options.version or self.program.version
        self._tree: Path | None = None

    def check(self) -> None:
        """Raises `ConfigError` where the program is not in the store."""
        if self.program.install is not None:
            store.find(self._store, self.program.name, self.version)

    def mounts(self, scratch: Path) -> Sequence[tuple[Path, str]]:
        """The program's tree, unpacked on this node; see `Installed.mounts`."""
        if self.program.install is None:
            return ()
        # Looked for once: not every rollout is to list a directory of the shared file system.
        if self._tree is None or not self._tree.is_dir():
            self._tree = node.unpack(store.find(self._store, self.program.name, self.version), scratch)
        return ((self._tree, TREE),)

    async def run(self, session: AgentSession) -> StopReason:
        """Runs the program to its end; see `Harness.run`."""
        facts = await _facts(session, self._config)
        argv = [fill_text(word, facts) for word in self.program.argv]
        argv += [fill_text(word, facts) for word in self._options.args]
        env = {**self.program.env, **self._options.env}
        for path, value in self.program.files.items():
            target = fill_text(path.replace("~/", "${home}/", 1), facts)
            await session.sandbox.put(content(value, facts), target, mode=0o600)
        result = await self._watch(
            session,
            argv,
            env={name: fill_text(value, facts) for name, value in env.items()},
            stdin=session.prompt.encode(errors="replace") if self.program.task_on_stdin else b"",
        )
        return await self._ending(session, result)

    async def _watch(
        self, session: AgentSession, argv: Sequence[str], *, env: Mapping[str, str], stdin: bytes
    ) -> ExecResult | None:
        """The program's end; None where it was stopped because the gateway had refused it for good."""
        started = time.monotonic()
        process = asyncio.ensure_future(
            session.sandbox.exec(argv, timeout_s=_FOREVER_S, env=env, stdin=stdin, output_bytes=_OUTPUT_BYTES)
        )
        result: ExecResult | None = None
        refused_s: float | None = None
        try:
            while not process.done():
                await asyncio.wait({process}, timeout=_POLL_S)
                grace_s = self._grace_s(session)
                if grace_s is None:
                    refused_s = None
                    continue
                refused_s = time.monotonic() if refused_s is None else refused_s
                if time.monotonic() - refused_s >= grace_s:
                    break
            if process.done():
                result = process.result()
            return result
        finally:
            if not process.done():
                process.cancel()
                with contextlib.suppress(asyncio.CancelledError, SandboxError):
                    await process
            session.actions.append(self._action(argv, started, result))

    async def _ending(self, session: AgentSession, result: ExecResult | None) -> StopReason:
        if result is not None and self.program.answer is Answer.STDOUT:
            session.answer = result.stdout.decode(errors="replace").strip() or None
        if session.model is not None and session.model.error is not None:
            raise session.model.error
        if session.model is not None and session.model.limit is not None:
            return session.model.limit
        assert result is not None, "only what the gateway refused is stopped"
        silent = session.model is not None and not session.model.calls
        if result.exit_code in self.program.success and not silent:
            return StopReason.EXITED
        if (result.exit_code is None or result.exit_code < 0) and not await session.sandbox.alive():
            raise SandboxError(f"rollout {session.rollout_id}: the sandbox died under its agent")
        ending = f"{result.exit_code}{' without a model call' if silent else ''}: {_last_words(result)}"
        raise HarnessError(f"{self.program.name} {self.version} exited with {ending}")

    def _action(self, argv: Sequence[str], started: float, result: ExecResult | None) -> Action:
        """The program as an action: its exit code and how much it said."""
        return Action(
            call_index=None,
            name=self.program.name,
            argument_sha256=sha256_hex(canonical_json(list(argv)).encode(errors="replace")),
            started_s=0.0,
            duration_s=time.monotonic() - started,
            exit_code=None if result is None else result.exit_code,
            timed_out=result is None,
            output_bytes=0 if result is None else result.stdout_bytes + result.stderr_bytes,
            output_truncated=result is not None and result.truncated,
        )

    def _grace_s(self, session: AgentSession) -> float | None:
        """How long the program may go on now that the gateway refuses it; None where it does not."""
        model = session.model
        if model is None:
            return None
        if model.error is not None:
            return max(_RETRY_S, self._options.grace_s)
        # Past the context a program may shorten it and go on.
        return None if model.limit in (None, StopReason.CONTEXT_LIMIT) else self._options.grace_s

    @property
    def _store(self) -> Path:
        return self._options.store or store.default_store()


async def _facts(session: AgentSession, config: HarnessConfig) -> dict[str, Any]:
    """What a program's declarations may name."""
    endpoint = session.endpoint
    home = await session.sandbox.exec(["sh", "-c", 'printf %s "$HOME"'], timeout_s=_PROBE_S)
    reply_tokens = min(endpoint.reply_tokens, endpoint.context_tokens // 2)
    return {
        "base_url": endpoint.base_url,
        "root_url": endpoint.base_url.removesuffix("/v1"),
        "api_key": endpoint.api_key,
        "model": endpoint.model,
        "task": session.prompt,
        "workdir": session.sandbox.workdir,
        "home": home.stdout.decode(errors="surrogateescape"),
        "context_tokens": endpoint.context_tokens,
        "reply_tokens": reply_tokens,
        "prompt_tokens": endpoint.context_tokens - reply_tokens,
        "prompt_share": (endpoint.context_tokens - reply_tokens) / 2**20,
        "max_turns": config.max_turns,
        "command_timeout_s": round(config.command_timeout_s),
        "command_timeout_ms": round(config.command_timeout_s * 1000),
        "output_bytes": config.output_bytes,
        "tree": TREE,
        **MACHINE,
    }


def _last_words(result: ExecResult) -> str:
    said = [stream.decode(errors="replace").strip() for stream in (result.stdout, result.stderr)]
    return " | ".join(words[-_TAIL_CHARS:] for words in said if words) or "it said nothing"
