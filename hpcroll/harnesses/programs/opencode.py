"""OpenCode, https://opencode.ai."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import TREE, Answer, Dialect, Npm, Program

_PROGRAM = f"{TREE}/node_modules/opencode-linux-${{cpu}}/bin/opencode"

_LIMIT = {"limit": {"context": "${context_tokens}", "output": "${reply_tokens}"}}
SETTINGS = {
    "autoupdate": False,
    "share": "disabled",
    "permission": "allow",
    "model": "hpcroll/${model}",
    "small_model": "hpcroll/${model}-auxiliary",  # for titles
    "provider": {
        "hpcroll": {
            "npm": "@ai-sdk/openai-compatible",  # comes with the program
            "options": {"baseURL": "${base_url}", "apiKey": "${api_key}"},
            "models": {"${model}": _LIMIT, "${model}-auxiliary": _LIMIT},
        }
    },
}
"""Also of the programs that descend from it."""


class OpenCode(BlackBoxHarness):
    """`opencode run`, every tool allowed; it compacts once the context has no room for a reply."""

    name = "opencode"
    program = Program(
        name="opencode",
        version="1.18.33",
        install=Npm({"opencode-linux-${cpu}": "${version}"}, node=None),
        dialect=Dialect.CHAT,
        argv=(_PROGRAM, "run", "--auto", "--model", "hpcroll/${model}"),
        task_on_stdin=True,
        env={
            "OPENCODE_CONFIG": "${home}/.config/opencode/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",  # it would install them
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files={"~/.config/opencode/opencode.json": SETTINGS},
        answer=Answer.STDOUT,
        success=(0, 1),  # 1 after any call that failed, the ones that it got over too
        version_argv=(_PROGRAM, "--version"),
    )
