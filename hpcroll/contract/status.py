"""Stages, ends and why: the vocabulary that spool, worker, shards and reports share."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """What a worker does with a rollout, in this order."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class Status(StrEnum):
    """How a rollout ended; every rollout ends in exactly one of these."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    """Why the agent stopped."""

    SUBMITTED = "submitted"
    """The agent said that it is done."""
    EXITED = "exited"
    """A black-box agent's process ended by itself with status 0."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    CONTEXT_LIMIT = "context_limit"
    TIME_LIMIT = "time_limit"
    ERROR = "error"
    """The attempt failed; see the failure."""
    CANCELLED = "cancelled"
    NOT_RUN = "not_run"
    """The rollout ended before its agent started."""

    @property
    def truncates(self) -> bool:
        """True where a limit ended the agent, so that the rollout is `truncated`."""
        return self in _LIMITS


_LIMITS = frozenset(
    {
        StopReason.TURN_LIMIT,
        StopReason.TOKEN_LIMIT,
        StopReason.CONTEXT_LIMIT,
        StopReason.TIME_LIMIT,
    }
)


class FailureClass(StrEnum):
    """Whose fault a failed attempt is; each class has its own cap of attempts."""

    TASK = "task"
    """The task or its image is broken: another node will not do better."""
    INFRA = "infra"
    """Sandbox, node or file system."""
    POLICY = "policy"
    """The inference side gave no usable answer."""
    KILL = "kill"
    """The worker died or was taken over; nobody knows whose fault it was."""


class EndReason(StrEnum):
    """Why an attempt ended without a result."""

    RELEASED = "released"
    """A planned stop (drain, preemption, time limit): spends no retry."""
    TASK = "task"
    INFRA = "infra"
    POLICY = "policy"
    KILL = "kill"
    """Its worker is known to be dead (`.ended`, or the scheduler says so)."""
    SILENCE = "silence"
    """Its worker's heartbeat stood still; never counts towards the caps of the other classes."""
