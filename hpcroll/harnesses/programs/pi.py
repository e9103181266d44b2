"""Pi, https://github.com/badlogic/pi-mono."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import NODE, TREE, Answer, Dialect, Npm, Program

_SCRIPT = f"{TREE}/node_modules/@mariozechner/pi-coding-agent/dist/cli.js"


class Pi(BlackBoxHarness):
    """`pi --print`; it compacts once the context has no room for a reply."""

    name = "pi"
    program = Program(
        name="pi",
        version="0.73.1",
        install=Npm({"@mariozechner/pi-coding-agent": "${version}"}),
        dialect=Dialect.CHAT,
        argv=(NODE, _SCRIPT, "--print", "--provider", "hpcroll", "--model", "${model}"),
        task_on_stdin=True,
        env={
            "PI_OFFLINE": "1",  # no downloads at the start
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        },
        files={
            "~/.pi/agent/models.json": {
                "providers": {
                    "hpcroll": {
                        "baseUrl": "${base_url}",
                        "apiKey": "${api_key}",
                        "api": "openai-completions",
                        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
                        "models": [
                            {
                                "id": "${model}",
                                "contextWindow": "${context_tokens}",
                                "maxTokens": "${reply_tokens}",
                            }
                        ],
                    }
                }
            },
            "~/.pi/agent/settings.json": {
                "compaction": {"reserveTokens": "${reply_tokens}", "keepRecentTokens": "${reply_tokens}"},
                "retry": {"maxRetries": 3},
            },
        },
        answer=Answer.STDOUT,
        version_argv=(NODE, _SCRIPT, "--version"),
    )
