"""One rollout from its claim to the result that is committed for it."""

from __future__ import annotations

import asyncio

from hpcroll.config import TimeoutRule
from hpcroll.contract import RecordedCall, Stage, Status, StopReason, Trajectory, Verdict
from hpcroll.gateway import read_journal
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.spool import Claim, Spool
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.bundle import Bundle, handed_over, write_bundle
from hpcroll.worker.committer import Committer
from hpcroll.worker.pools import Flight
from hpcroll.worker.stages import Stages

Result = Trajectory | Bundle
"""What a leg ends with: the committed trajectory, or what the next leg needs."""


class Conductor:
    """Conducts rollouts through the stages of one leg."""

    def __init__(
        self,
        spool: Spool,
        leg: tuple[Stage, ...],
        *,
        stages: Stages,
        assembly: Assembly,
        provider: SandboxProvider,
    ) -> None:
        self._spool = spool
        self._leg = leg
        self._stages = stages
        self._assembly = assembly
        self._provider = provider

    async def conduct(self, flight: Flight) -> Result:
        """Does this leg's stages; what it raises is the failure of the attempt."""
        claim = flight.claim
        if claim.poisoned is not None:
            return await asyncio.to_thread(self._give_up, flight)
        if claim.cancelled:
            return await asyncio.to_thread(self.abandon, flight, Status.CANCELLED, StopReason.CANCELLED)
        bundle = await self._enter(flight)
        if Stage.EVAL not in self._leg:
            return bundle
        return self._assembly.finish(bundle.draft, flight, await self._verdict(flight, bundle))

    def abandon(self, flight: Flight, status: Status, stop_reason: StopReason) -> Trajectory:
        """The record of a rollout that ends here without a verdict, with what its agent did so far."""
        agent = flight.agent
        draft = self._assembly.abandoned(
            flight.claim,
            status=status,
            stop_reason=stop_reason,
            calls=flight.model.calls if flight.model else (),
            actions=agent.actions if agent else (),
            answer=agent.answer if agent else None,
        )
        return self._assembly.finish(draft, flight, None)

    async def commit(self, flight: Flight, result: Result, committer: Committer) -> bool:
        """Makes the result durable and visible; whether it became the rollout's."""
        if isinstance(result, Trajectory):
            return await committer.commit(flight.claim, result)
        await asyncio.to_thread(write_bundle, flight.claim.bundle, result)
        return await committer.commit(flight.claim, None)

    async def _enter(self, flight: Flight) -> Bundle:
        """The bundle before evaluation: made here, or by the leg before."""
        claim = flight.claim
        if Stage.RUN in self._leg:
            ran = await self._stages.init_and_run(flight)
            image_sha256 = await asyncio.to_thread(self._provider.image_digest, claim.rollout.task.image)
            status = Status.TRUNCATED if ran.stop_reason.truncates else Status.COMPLETED
            # A long session takes a while to put together, and others must not wait for it.
            draft = await asyncio.to_thread(
                self._draft, flight, status, ran.stop_reason, image_sha256=image_sha256
            )
            return Bundle(self._assembly.hand_over(draft, flight), ran.artefacts)
        bundle = await asyncio.to_thread(handed_over, self._spool, claim)
        assert bundle is not None, "a leg without the run stage is not the first"
        return bundle

    async def _verdict(self, flight: Flight, bundle: Bundle) -> Verdict:
        record = bundle.draft.record
        if record.stop_reason.truncates and self._spool.config.stages.on_timeout is TimeoutRule.DROP:
            because = f"stopped by {record.stop_reason}, and stages.on_timeout is drop"
            return Verdict(reward=None, no_reward_because=because)
        return await self._stages.eval(flight, bundle.artefacts)

    def _draft(
        self, flight: Flight, status: Status, stop_reason: StopReason, *, image_sha256: str | None = None
    ) -> Trajectory:
        return self._assembly.draft(
            flight.claim,
            status=status,
            stop_reason=stop_reason,
            calls=flight.model.calls if flight.model else (),
            actions=flight.agent.actions if flight.agent else (),
            answer=flight.agent.answer if flight.agent else None,
            image_sha256=image_sha256,
        )

    def _give_up(self, flight: Flight) -> Trajectory:
        """The `failed` record of a rollout past its cap, with the model calls of its last attempt."""
        claim = flight.claim
        draft = self._assembly.abandoned(
            claim,
            status=Status.FAILED,
            stop_reason=StopReason.ERROR,
            calls=self._journalled(claim),
            failure=claim.cause,
        )
        return self._assembly.finish(draft, flight, None)

    def _journalled(self, claim: Claim) -> list[RecordedCall]:
        """The calls of the latest failed attempt that made any, from its worker's journal."""
        for failure in reversed(claim.failures):
            path = self._spool.paths.journal_file(failure.incarnation)
            if failure.incarnation and path.exists():
                calls = list(read_journal(path, rollout_id=claim.rollout.rollout_id, attempt=failure.attempt))
                if calls:
                    return calls
        return []
