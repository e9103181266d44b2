"""Gemini CLI, https://github.com/google-gemini/gemini-cli."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import NODE, TREE, Answer, Dialect, Npm, Program

_SCRIPT = f"{TREE}/node_modules/@google/gemini-cli/bundle/gemini.js"


class GeminiCli(BlackBoxHarness):
    """`gemini`, every tool approved; it compacts once the context has no room for a reply."""

    name = "gemini_cli"
    program = Program(
        name="gemini_cli",
        version="0.61.0",
        install=Npm({"@google/gemini-cli": "${version}"}),
        dialect=Dialect.GENERATE_CONTENT,
        argv=(NODE, _SCRIPT, "--approval-mode=yolo", "--model", "${model}", "--prompt=${task}"),
        env={
            "GEMINI_API_KEY": "${api_key}",
            "GOOGLE_GEMINI_BASE_URL": "${root_url}",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_CLI_NO_RELAUNCH": "true",  # it starts itself again to have more memory
        },
        files={
            "~/.gemini/settings.json": {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "general": {
                    "enableAutoUpdate": False,
                    "enableAutoUpdateNotification": False,
                    "maxAttempts": 3,
                },
                "model": {
                    # A share of the 2^20 tokens that it believes every model to have.
                    "compressionThreshold": "${prompt_share}",
                    # After 30 turns it would ask whether it loops, and not go on without JSON for an answer.
                    "disableLoopDetection": True,
                },
            }
        },
        answer=Answer.STDOUT,
        version_argv=(NODE, _SCRIPT, "--version"),
    )
