"""Puts a trajectory together from what a rollout left: calls, actions, verdict, failures."""

from __future__ import annotations

from collections.abc import Sequence

from hpcroll.config import RunConfig, TimeoutRule
from hpcroll.contract import (
    Action,
    Failure,
    RecordedCall,
    Resources,
    Status,
    StopReason,
    Timing,
    Trajectory,
    TrajectoryRecord,
    Verdict,
)
from hpcroll.errors import HpcrollError
from hpcroll.spool import Claim, Incarnation, Spool
from hpcroll.trajectory import build
from hpcroll.worker.bundle import handed_over
from hpcroll.worker.pools import Flight


class Assembly:
    """Assembles the trajectories of one worker."""

    def __init__(
        self,
        spool: Spool,
        incarnation: Incarnation,
        *,
        harness: str,
        harness_version: str,
        tokenizer_sha256: str | None = None,
        template_sha256: str | None = None,
    ) -> None:
        """The digests are those of the renderer in mode `tokens`; None where the server renders unseen."""
        self._spool = spool
        self._run_id = spool.run_id
        self._config: RunConfig = spool.config
        self._config_sha256 = spool.config.digest()
        self._incarnation = incarnation
        self._harness = (harness, harness_version)
        self._tokenizer_sha256 = tokenizer_sha256
        self._template_sha256 = template_sha256

    def draft(
        self,
        claim: Claim,
        *,
        status: Status,
        stop_reason: StopReason,
        calls: Sequence[RecordedCall] = (),
        actions: Sequence[Action] = (),
        answer: str | None = None,
        failure: Failure | None = None,
        image_sha256: str | None = None,
    ) -> Trajectory:
        """The trajectory as far as its run stage goes: no verdict, no reward, not trainable yet."""
        rollout, model = claim.rollout, self._config.model
        built = build(
            calls,
            train_on_shaped_logprobs=model.train_on_shaped_logprobs,
            roles=model.train_roles,
            policies=(model.name,),
        )
        record = TrajectoryRecord(
            run_id=self._run_id,
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            group_size=rollout.group_size,
            sample_index=rollout.sample_index,
            task_id=rollout.task.task_id,
            task_sha256=rollout.task.digest(),
            dataset=rollout.task.dataset,
            attempt=claim.attempt,
            incarnation=self._incarnation.id,
            handler=rollout.task.handler,
            harness=self._harness[0],
            harness_version=self._harness[1],
            image_sha256=image_sha256,
            config_sha256=self._config_sha256,
            status=status,
            stop_reason=stop_reason,
            failure=failure,
            attempts=claim.failures,
            trainable=False,
            not_trainable_because=built.masked,
            segments=built.segments,
            calls=tuple(recorded.call for recorded in calls),
            call_spans=built.call_spans,
            dropped=built.dropped,
            actions=tuple(actions),
            gaps=built.gaps,
            answer=answer,
            model_name=model.name,
            tokenizer_sha256=self._tokenizer_sha256,
            template_sha256=self._template_sha256,
        )
        return Trajectory(record, built.tokens)

    def abandoned(
        self,
        claim: Claim,
        *,
        status: Status,
        stop_reason: StopReason,
        calls: Sequence[RecordedCall] = (),
        actions: Sequence[Action] = (),
        answer: str | None = None,
        failure: Failure | None = None,
    ) -> Trajectory:
        """The draft of a rollout that ends here without a verdict: what its agent did, here or a leg before.

        What the leg before left and cannot be read is named in `gaps`: no rollout stays open for it.
        """
        gaps: tuple[str, ...] = ()
        try:
            before = handed_over(self._spool, claim)
        except (OSError, HpcrollError) as error:
            before, gaps = None, (f"what the leg before left cannot be read: {error}",)
        if before is not None and not calls:
            record = before.draft.record
            fields = {
                "status": status,
                "stop_reason": stop_reason,
                "failure": failure,
                "attempts": (*record.attempts, *claim.failures),
            }
            return Trajectory(record.model_copy(update=fields), before.draft.tokens)
        draft = self.draft(
            claim,
            status=status,
            stop_reason=stop_reason,
            calls=calls,
            actions=actions,
            answer=answer,
            failure=failure,
        )
        gaps = (*draft.record.gaps, *gaps)
        return Trajectory(draft.record.model_copy(update={"gaps": gaps}), draft.tokens)

    def hand_over(self, draft: Trajectory, flight: Flight) -> Trajectory:
        """The draft with the timings of the stages so far, for the next leg."""
        timing = _timing(draft.record.timing, flight)
        return Trajectory(draft.record.model_copy(update={"timing": timing}), draft.tokens)

    def finish(self, draft: Trajectory, flight: Flight, verdict: Verdict | None) -> Trajectory:
        """The trajectory as it is committed: `draft` with its verdict, timings and who commits it."""
        because = _obstacles(draft, verdict, self._config.stages.on_timeout)
        record = draft.record.model_copy(
            update={
                "attempt": flight.claim.attempt,
                "incarnation": self._incarnation.id,
                "verdict": verdict,
                "reward": verdict.reward if verdict else None,
                "reward_valid": verdict is not None and verdict.reward is not None,
                "trainable": not because,
                "not_trainable_because": because,
                "timing": _timing(draft.record.timing, flight),
                "resources": Resources(node=self._incarnation.host, slurm_job=self._incarnation.job_id),
            }
        )
        return Trajectory(record, draft.tokens)


def _obstacles(draft: Trajectory, verdict: Verdict | None, rule: TimeoutRule) -> tuple[str, ...]:
    """Why a trainer should not train on it; empty where it may."""
    record = draft.record
    because = []
    if record.status in (Status.FAILED, Status.CANCELLED):
        because.append(f"status {record.status}")
    if verdict is None:
        because.append("no verdict")
    elif verdict.reward is None:
        because.append(f"no reward: {verdict.no_reward_because}")
    if record.status is Status.TRUNCATED and rule is not TimeoutRule.GRADE:
        because.append(f"stopped by {record.stop_reason}, stages.on_timeout is {rule}")
    if not any(segment.loss_mask.any() for segment in draft.tokens):
        because += record.not_trainable_because or ["no token was sampled"]
    return tuple(because)


def _timing(before: Timing, flight: Flight) -> Timing:
    """The timings of earlier legs, with those of this one."""
    stages = {stage.value: timing for stage, timing in flight.timings.items()}
    return before.model_copy(
        update={
            "submitted_at": before.submitted_at or flight.claim.submitted_at,
            "claimed_at": before.claimed_at or flight.claimed_at,
            **stages,
        }
    )
