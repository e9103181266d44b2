"""Deep Agents Code, https://github.com/langchain-ai/deepagents."""

from __future__ import annotations

from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import PYTHON, Answer, Dialect, Pip, Program

_COMMAND = (PYTHON, "-m", "deepagents_code")
_MODEL = '{"max_tokens": ${reply_tokens}, "include": ["reasoning.encrypted_content"]}'
"""Its own servers keep the thinking; whoever asks for it sealed sends it back."""


class DeepAgentsCode(BlackBoxHarness):
    """`dcode` without questions, every command allowed; it compacts as the context fills."""

    name = "deepagents_code"
    program = Program(
        name="deepagents_code",
        version="0.1.88",
        install=Pip(("deepagents-code==${version}",), python=(3, 12)),
        dialect=Dialect.RESPONSES,
        argv=(
            *(*_COMMAND, "--stdin", "--quiet", "--shell-allow-list", "all", "--no-mcp", "--no-tracing"),
            *("--max-retries", "3", "--model", "openai:${model}"),
            *("--summarization-model", "openai:${model}-auxiliary"),
            *("--model-params", _MODEL),
            *("--profile-override", '{"max_input_tokens": ${prompt_tokens}}'),
        ),
        task_on_stdin=True,
        env={
            "OPENAI_BASE_URL": "${base_url}",
            "OPENAI_API_KEY": "${api_key}",
            "DEEPAGENTS_CODE_OFFLINE": "1",  # it would download ripgrep
            "DEEPAGENTS_CODE_NO_UPDATE_CHECK": "1",
            "DEEPAGENTS_CODE_PRICES_AUTO_UPDATE": "0",
            "DO_NOT_TRACK": "1",
        },
        answer=Answer.STDOUT,
        version_argv=(*_COMMAND, "--version"),
    )
