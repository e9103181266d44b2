"""Kilo Code's command line, https://kilo.ai; it descends from OpenCode."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import TREE, Answer, Dialect, Npm, Program
from hpcroll.harnesses.programs.opencode import SETTINGS

_PROGRAM = f"{TREE}/node_modules/@kilocode/cli-linux-${{cpu}}/bin/kilo"


class KiloCode(BlackBoxHarness):
    """`kilo run`, every tool allowed; it compacts once the context has no room for a reply."""

    name = "kilo_code"
    program = Program(
        name="kilo_code",
        version="7.7.9",
        install=Npm({"@kilocode/cli-linux-${cpu}": "${version}"}, node=None),
        dialect=Dialect.CHAT,
        argv=(_PROGRAM, "run", "--auto", "--model", "hpcroll/${model}"),
        task_on_stdin=True,
        env={
            "KILO_CONFIG": "${home}/.config/kilo/kilo.json",
            "KILO_DISABLE_AUTOUPDATE": "1",
            "KILO_DISABLE_MODELS_FETCH": "1",
            "KILO_DISABLE_DEFAULT_PLUGINS": "1",  # it would install them
            "KILO_DISABLE_LSP_DOWNLOAD": "1",
            "KILO_DISABLE_SESSION_INGEST": "1",
        },
        files={
            "~/.config/kilo/kilo.json": {
                **SETTINGS,
                "experimental": {"openTelemetry": False},
                "enabled_providers": ["hpcroll"],  # it asks others for their models before each call
                "snapshot": False,  # of the repository, before each call
            },
        },
        answer=Answer.STDOUT,
        success=(0, 1),  # 1 after any call that failed, the ones that it got over too
        version_argv=(_PROGRAM, "--version"),
    )
