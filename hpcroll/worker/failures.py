"""Whose fault a failed attempt is."""

from __future__ import annotations

from hpcroll.contract import EndReason, Failure, FailureClass, Stage
from hpcroll.errors import (
    EvaluatorError,
    HarnessError,
    HpcrollError,
    ImageError,
    IsolationUnavailableError,
    ModelError,
)

_TASK_FAULTS = (ImageError, IsolationUnavailableError, HarnessError, EvaluatorError)
_MESSAGE_CHARS = 2000


def blame(error: BaseException) -> EndReason:
    """The failure class of an attempt that ended with `error`, as the reason of its end.

    What another node will not do better is the task's fault, what no server answered is the policy
    side's, and everything else, errors of our own included, is the infrastructure's.
    """
    if isinstance(error, _TASK_FAULTS):
        return EndReason.TASK
    if isinstance(error, ModelError):
        return EndReason.POLICY
    return EndReason.INFRA


def describe(
    error: BaseException, *, attempt: int, stage: Stage | None, node: str, incarnation: str
) -> Failure:
    """The failure record of an attempt that ended with `error`."""
    reason = blame(error)
    text = str(error) or repr(error)
    if isinstance(error, TimeoutError) and not isinstance(error, HpcrollError):
        text = f"stage {stage} ran into its deadline"
    return Failure(
        attempt=attempt,
        reason=reason,
        failure_class=FailureClass(reason.value),
        stage=stage,
        error=type(error).__name__,
        message=text[-_MESSAGE_CHARS:],
        node=node,
        incarnation=incarnation,
    )
