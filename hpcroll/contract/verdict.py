"""The verdict: what an evaluator says of a rollout."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from hpcroll.contract.schema import Record


class Verdict(Record):
    """The evaluation of one rollout.

    `reward` is None where there is none, and `no_reward_because` then says why: None is not 0.0.
    """

    SCHEMA: ClassVar[str] = "1.0"

    reward: float | None
    """The outcome reward, finite, usually within [0, 1]."""
    no_reward_because: str | None = None
    components: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward."""
    evaluator: str = ""
    exit_code: int | None = None
    tests_passed: tuple[str, ...] = ()
    """Names of the tests that had to pass and did."""
    tests_failed: tuple[str, ...] = ()
    """Names of the tests that had to pass and did not."""
    patch_sha256: str | None = None
    log_tail: str = ""
    """The end of the evaluator's output (bounded), for people."""
    duration_s: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _reward_or_reason(self) -> Verdict:
        if (self.reward is None) == (self.no_reward_because is None):
            raise ValueError("a verdict has either a reward or no_reward_because, never both or none")
        return self
