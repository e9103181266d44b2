"""OpenHands, https://github.com/OpenHands/software-agent-sdk."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import PYTHON, Dialect, Pip, Program

_DRIVER = """\
import os
import sys

from openhands.sdk import LLM, Conversation, LLMSummarizingCondenser
from openhands.tools.preset.default import get_default_agent

llm = LLM(
    usage_id="agent",
    model="openai/" + os.environ["LLM_MODEL"],
    base_url=os.environ["LLM_BASE_URL"],
    api_key=os.environ["LLM_API_KEY"],
    max_input_tokens=int(os.environ["LLM_PROMPT_TOKENS"]),
    max_output_tokens=int(os.environ["LLM_REPLY_TOKENS"]),
    num_retries=3,
    stream=False,
)
condenser = LLMSummarizingCondenser(
    llm=llm.model_copy(update={"usage_id": "condenser"}),
    max_size=240,
    max_tokens=int(os.environ["LLM_PROMPT_TOKENS"]),
    keep_first=2,
)
agent = get_default_agent(llm=llm, cli_mode=True).model_copy(update={"condenser": condenser})
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.stdin.read())
conversation.run()
"""


class OpenHands(BlackBoxHarness):
    """The default agent of the OpenHands SDK, without its browser; it summarises as the context fills."""

    name = "openhands"
    program = Program(
        name="openhands",
        version="1.58.2",
        install=Pip(("openhands-sdk==${version}", "openhands-tools==${version}"), python=(3, 12)),
        dialect=Dialect.CHAT,
        argv=(PYTHON, "${home}/.openhands/driver.py"),
        task_on_stdin=True,
        env={
            "LLM_BASE_URL": "${base_url}",
            "LLM_API_KEY": "${api_key}",
            "LLM_MODEL": "${model}",
            "LLM_PROMPT_TOKENS": "${prompt_tokens}",
            "LLM_REPLY_TOKENS": "${reply_tokens}",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would download one
        },
        files={"~/.openhands/driver.py": _DRIVER},
        version_argv=(PYTHON, "-c", "import openhands.sdk; print(openhands.sdk.__version__)"),
    )
