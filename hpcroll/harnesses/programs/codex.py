"""Codex, https://github.com/openai/codex."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import TREE, Answer, Dialect, Npm, Program

_PROGRAM = (
    f"{TREE}/node_modules/@openai/codex-linux-${{cpu}}/vendor/${{machine}}-unknown-linux-musl/bin/codex"
)
_CONFIG = """\
model = "${model}"
model_provider = "hpcroll"
model_context_window = ${context_tokens}
model_auto_compact_token_limit = ${prompt_tokens}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.hpcroll]
name = "hpcroll"
base_url = "${base_url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
request_max_retries = 3
stream_max_retries = 3

[analytics]
enabled = false

[feedback]
enabled = false

[history]
persistence = "none"
"""


class Codex(BlackBoxHarness):
    """`codex exec` without its own sandbox; it compacts once the context has no room for a reply."""

    name = "codex"
    program = Program(
        name="codex",
        version="0.171.0",
        install=Npm(
            {"@openai/codex-linux-${cpu}": "npm:@openai/codex@${version}-linux-${cpu}"},
            node=None,
            prune=("@openai/codex-linux-*/vendor/*/codex-resources/voice",),
        ),
        dialect=Dialect.RESPONSES,
        argv=(_PROGRAM, "exec", "--skip-git-repo-check", "--color", "never", "-"),
        task_on_stdin=True,
        env={
            "OPENAI_API_KEY": "${api_key}",
            "CODEX_HOME": "${home}/.codex",
        },
        files={"~/.codex/config.toml": _CONFIG},
        answer=Answer.STDOUT,
        version_argv=(_PROGRAM, "--version"),
    )
