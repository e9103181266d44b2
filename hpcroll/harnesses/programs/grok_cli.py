"""Grok CLI, https://github.com/superagent-ai/grok-cli."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import NODE, TREE, Answer, Dialect, Npm, Program

_SCRIPT = f"{TREE}/node_modules/@vibe-kit/grok-cli/dist/index.js"


class GrokCli(BlackBoxHarness):
    """`grok --prompt`, every command run unasked; it never shortens its context."""

    name = "grok_cli"
    program = Program(
        name="grok_cli",
        version="0.0.34",
        install=Npm({"@vibe-kit/grok-cli": "${version}"}),
        dialect=Dialect.CHAT,
        argv=(
            *(NODE, _SCRIPT, "--directory", "${workdir}", "--max-tool-rounds", "${max_turns}"),
            "--prompt=${task}",
        ),
        env={
            "GROK_API_KEY": "${api_key}",
            "GROK_BASE_URL": "${base_url}",
            "GROK_MODEL": "${model}",
            "GROK_MAX_TOKENS": "${reply_tokens}",
        },
        answer=Answer.STDOUT,  # the conversation, a JSON object a line
        version_argv=(NODE, _SCRIPT, "--version"),
    )
