"""Mistral Vibe, https://github.com/mistralai/mistral-vibe."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import PYTHON, TREE, Answer, Dialect, Pip, Program

_PROGRAM = f"{TREE}/python/packages/vibe/_bin/vibe-rs"
_SERVER = """\
import sys

from vibe.app_server.stdio import main

sys.exit(main())
"""
_CONFIG = """\
active_model = "hpcroll"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
enable_connectors = false
enable_notifications = false
experimental_enable_model_catalog = false

[experiments]
enable = false

[session_logging]
generate_titles = false

[[providers]]
name = "hpcroll"
api_base = "${base_url}"
api_key_env_var = "OPENAI_API_KEY"

[[models]]
alias = "hpcroll"
name = "${model}"
provider = "hpcroll"
max_context_length = ${context_tokens}
max_output_tokens = ${reply_tokens}
auto_compact_threshold = ${prompt_tokens}

[compaction_model]
alias = "auxiliary"
name = "${model}-auxiliary"
provider = "hpcroll"
max_context_length = ${context_tokens}
max_output_tokens = ${reply_tokens}
"""


class MistralVibe(BlackBoxHarness):
    """`vibe --prompt`, every tool approved; it compacts once the context has no room for a reply."""

    name = "mistral_vibe"
    program = Program(
        name="mistral_vibe",
        version="3.0.2",
        install=Pip(("mistral-vibe==${version}",), python=(3, 12)),
        dialect=Dialect.CHAT,
        argv=(_PROGRAM, "--prompt", "--auto-approve", "--trust"),
        task_on_stdin=True,
        env={
            # The program starts its other half, which is Python's.
            "VIBE_APP_SERVER_CMD": f"{PYTHON} ${{home}}/.vibe/app_server.py",
            "VIBE_HOME": "${home}/.vibe",
            "OPENAI_API_KEY": "${api_key}",
            "MISTRAL_API_KEY": "none",  # it would look for one in keyrings
        },
        files={"~/.vibe/app_server.py": _SERVER, "~/.vibe/config.toml": _CONFIG},
        answer=Answer.STDOUT,
        version_argv=(_PROGRAM, "--version"),
    )
