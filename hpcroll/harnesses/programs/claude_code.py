"""Claude Code, https://github.com/anthropics/claude-code."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import TREE, Answer, Dialect, Npm, Program

_PROGRAM = f"{TREE}/node_modules/@anthropic-ai/claude-code-linux-${{cpu}}/claude"


class ClaudeCode(BlackBoxHarness):
    """`claude --print`, every tool allowed; it compacts as the context fills."""

    name = "claude_code"
    program = Program(
        name="claude_code",
        version="2.1.197",
        install=Npm({"@anthropic-ai/claude-code-linux-${cpu}": "${version}"}, node=None),
        dialect=Dialect.MESSAGES,
        argv=(_PROGRAM, "--print", "--dangerously-skip-permissions", "--model", "${model}"),
        task_on_stdin=True,
        env={
            "ANTHROPIC_BASE_URL": "${root_url}",
            "ANTHROPIC_API_KEY": "${api_key}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "${model}-auxiliary",  # for its side calls
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "${model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "${model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "${model}-subagent",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, updates, error reports
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "${reply_tokens}",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "${context_tokens}",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "${context_tokens}",
            "CLAUDE_CODE_MAX_RETRIES": "3",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line of the prompt that differs each time
            "DISABLE_AUTOUPDATER": "1",
            "BASH_DEFAULT_TIMEOUT_MS": "${command_timeout_ms}",
            "IS_SANDBOX": "1",  # it refuses to skip its questions as root otherwise
        },
        answer=Answer.STDOUT,
        version_argv=(_PROGRAM, "--version"),
    )
