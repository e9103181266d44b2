"""Qwen Code, https://github.com/QwenLM/qwen-code."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import NODE, TREE, Answer, Dialect, Npm, Program

_SCRIPT = f"{TREE}/node_modules/@qwen-code/qwen-code/cli.js"


class QwenCode(BlackBoxHarness):
    """`qwen`, every tool approved; it compacts at 70 % of the context."""

    name = "qwen_code"
    program = Program(
        name="qwen_code",
        version="0.15.10",
        install=Npm({"@qwen-code/qwen-code": "${version}"}),
        dialect=Dialect.CHAT,
        argv=(NODE, _SCRIPT, "--auth-type", "openai", "--yolo", "--prompt=${task}"),
        env={
            "OPENAI_BASE_URL": "${base_url}",
            "OPENAI_API_KEY": "${api_key}",
            "OPENAI_MODEL": "${model}",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": "${reply_tokens}",
            "QWEN_CODE_NO_RELAUNCH": "true",  # it starts itself again to have more memory
        },
        files={
            "~/.qwen/settings.json": {
                "general": {"enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                # A call after the work, for sessions that never come.
                "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
                "model": {
                    "generationConfig": {"contextWindowSize": "${context_tokens}", "maxRetries": 3},
                },
            }
        },
        answer=Answer.STDOUT,
        version_argv=(NODE, _SCRIPT, "--version"),
    )
