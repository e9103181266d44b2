"""The task: a problem to solve, as submitted."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, JsonValue, StringConstraints

from hpcroll.contract.ref import RolloutRef, group_id
from hpcroll.contract.schema import Frozen, Record

Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A printable identifier."""


class Task(Record):
    """One problem, solved `samples` times by a group of rollouts.

    `spec` belongs to the handler, which validates it before anything is submitted. Paths in a spec are
    relative to the task file that names them; submission makes them absolute.
    """

    SCHEMA: ClassVar[str] = "1.0"

    task_id: Name
    """Unique within one submission."""
    handler: Name
    """Entry point `hpcroll.handlers`: who initialises, runs and evaluates it."""
    prompt: str = Field(min_length=1, max_length=1_000_000)
    """What the agent is asked to do."""
    dataset: str = ""
    """Where the task comes from; carried into the trajectory."""
    image: str | None = None
    """Image of the sandbox; the config's `sandbox.image` where absent."""
    spec: dict[str, JsonValue] = Field(default_factory=dict)
    """The handler's own fields (repository, hidden tests, expected answer, ...)."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Carried along, never read."""

    def problem(self) -> Any:
        """What makes two tasks the same problem: everything but `metadata`."""
        return self.model_dump(mode="json", exclude={"metadata"})


class Rollout(Frozen):
    """One sample of one task, as a worker gets it."""

    ref: RolloutRef
    task: Task
    sample_index: int = Field(ge=0)
    group_size: int = Field(ge=1)

    @property
    def rollout_id(self) -> str:
        return self.ref.rollout_id

    @property
    def group_id(self) -> str:
        """`<segment>/g<task index>`: the samples of one task that are compared with each other."""
        return group_id(self.ref, self.group_size)
