"""Continue's command line, https://github.com/continuedev/continue."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import NODE, TREE, Answer, Dialect, Npm, Program

_SCRIPT = f"{TREE}/node_modules/@continuedev/cli/dist/cn.js"


class ContinueCli(BlackBoxHarness):
    """`cn --print`, every tool allowed; it compacts as the context fills."""

    name = "continue_cli"
    program = Program(
        name="continue_cli",
        version="1.5.47",
        install=Npm({"@continuedev/cli": "${version}"}),
        dialect=Dialect.CHAT,
        argv=(NODE, _SCRIPT, "--print", "--auto", "--config", "${home}/.continue/config.yaml"),
        task_on_stdin=True,
        env={
            "CONTINUE_TELEMETRY_ENABLED": "0",
            "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        },
        files={
            # JSON is YAML.
            "~/.continue/config.yaml": {
                "name": "hpcroll",
                "version": "1.0.0",
                "schema": "v1",
                "models": [
                    {
                        "name": "${model}",
                        "provider": "openai",
                        "model": "${model}",
                        "apiBase": "${base_url}",
                        "apiKey": "${api_key}",
                        "roles": ["chat"],
                        "capabilities": ["tool_use"],
                        "defaultCompletionOptions": {
                            "contextLength": "${context_tokens}",
                            "maxTokens": "${reply_tokens}",
                        },
                    }
                ],
            }
        },
        answer=Answer.STDOUT,
        version_argv=(NODE, _SCRIPT, "--version"),
    )
