"""mini-SWE-agent, https://mini-swe-agent.com."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import PYTHON, Dialect, Pip, Program


class MiniSweAgent(BlackBoxHarness):
    """`mini`, every command run unasked; it never shortens its context."""

    name = "mini_swe_agent"
    program = Program(
        name="mini_swe_agent",
        version="2.4.6",
        install=Pip(("mini-swe-agent==${version}",)),
        dialect=Dialect.CHAT,
        argv=(
            *(PYTHON, "-m", "minisweagent.run.mini", "--model", "openai/${model}", "--task=${task}"),
            *("--yolo", "--exit-immediately", "--cost-limit", "0", "--output", "${home}/mini.json"),
            *("-c", "mini.yaml", "-c", "model.model_kwargs.api_base=${base_url}"),
            *("-c", "environment.timeout=${command_timeout_s}"),
        ),
        env={
            "OPENAI_API_KEY": "${api_key}",
            "MSWEA_CONFIGURED": "true",  # it would ask on its first start
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would download one
        },
        version_argv=(PYTHON, "-c", "import minisweagent; print(minisweagent.__version__)"),
    )
