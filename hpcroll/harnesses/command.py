"""Any program of the image as an agent: a command line and the variables that name its model."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hpcroll.config import HarnessConfig, Strict
from hpcroll.harnesses.black_box import BlackBoxHarness, BlackBoxOptions
from hpcroll.harnesses.programs.base import Answer, Dialect, Program


class CommandOptions(BlackBoxOptions):
    """`harness.options` of the `command` harness; texts may name facts, `${task}` for example."""

    argv: tuple[str, ...] = Field(min_length=1)
    """The command line."""
    files: dict[str, Any] = Field(default_factory=dict)
    """Files to write first: path (`~/` is the home) to a text, or to a value that is written as JSON."""
    base_url_env: str = "OPENAI_BASE_URL"
    """Variable that gets the model's base URL, `/v1` included."""
    api_key_env: str = "OPENAI_API_KEY"
    """Variable that gets its key."""
    model_env: str = "OPENAI_MODEL"
    """Variable that gets its name."""
    dialect: Dialect = Dialect.CHAT
    """The API that the program speaks; for the record."""
    task_on_stdin: bool = False
    """Give the task on standard input."""
    answer: Answer = Answer.STDOUT
    """Whether its output is its answer."""
    success: tuple[int, ...] = (0,)
    """Exit codes of a run that ended well."""


class CommandHarness(BlackBoxHarness):
    """Runs a command line that the config gives, with the image's own programs."""

    Options: ClassVar[type[Strict]] = CommandOptions
    name: ClassVar[str] = "command"

    def __init__(self, config: HarnessConfig) -> None:
        options = CommandOptions.model_validate(config.options)
        self.program = Program(
            name=self.name,
            version="1",
            install=None,
            dialect=options.dialect,
            argv=options.argv,
            env={
                options.base_url_env: "${base_url}",
                options.api_key_env: "${api_key}",
                options.model_env: "${model}",
            },
            files=options.files,
            task_on_stdin=options.task_on_stdin,
            answer=options.answer,
            success=options.success,
        )
        super().__init__(config)
