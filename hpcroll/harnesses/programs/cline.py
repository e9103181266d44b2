"""Cline's command line, https://cline.bot."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import TREE, Dialect, Npm, Program

_PROGRAM = f"{TREE}/node_modules/@cline/cli-linux-${{cpu}}/bin/cline"


class Cline(BlackBoxHarness):
    """`cline`, every tool approved; it compacts as the context fills."""

    name = "cline"
    program = Program(
        name="cline",
        version="3.0.65",
        install=Npm({"@cline/cli-linux-${cpu}": "${version}"}, node=None),
        dialect=Dialect.CHAT,
        argv=(_PROGRAM, "--auto-approve", "true", "--provider", "openai-compatible", "--", "${task}"),
        env={
            "CLINE_SESSION_BACKEND_MODE": "local",  # no daemon that outlives it
            "CLINE_NO_AUTO_UPDATE": "1",
            "DO_NOT_TRACK": "1",
        },
        files={
            "~/.cline/data/settings/global-settings.json": {
                "telemetryOptOut": True,
                "autoUpdateEnabled": False,
            },
            "~/.cline/data/settings/providers.json": {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "modes": {},
                "providers": {
                    "openai-compatible": {
                        "settings": {
                            "provider": "openai-compatible",
                            "apiKey": "${api_key}",
                            "model": "${model}",
                            "baseUrl": "${base_url}",
                            "contextWindow": "${context_tokens}",
                            "maxTokens": "${reply_tokens}",
                        },
                        "updatedAt": "2026-01-01T00:00:00.000Z",
                        "tokenSource": "manual",
                    }
                },
            },
        },
        version_argv=(_PROGRAM, "--version"),
    )
