"""Takes over what dead incarnations left: ends their attempt, so that the next one may be claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcroll.contract import EndReason, Failure, FailureClass, RolloutRef
from hpcroll.fs import read_token
from hpcroll.spool.attempts import write_end
from hpcroll.spool.board import Board, Candidate
from hpcroll.spool.incarnation import Incarnation
from hpcroll.spool.liveness import Liveness
from hpcroll.spool.manifest import Segment

_MESSAGES = {
    EndReason.KILL: "its worker is dead: said by the worker's parent or by the scheduler",
    EndReason.SILENCE: "its worker's heartbeat stood still",
}


class Takeover:
    """Finds attempts of dead incarnations. Not thread-safe; its owner serialises."""

    def __init__(self, incarnation: Incarnation, leg: str, liveness: Liveness, board: Board) -> None:
        self._incarnation = incarnation
        self._paths = incarnation.paths
        self._leg = leg
        self._liveness = liveness
        self._board = board
        self._holders: dict[tuple[RolloutRef, int], str] = {}
        self._scanned: tuple[int, int] | None = None

    def ended_attempts(self, wanted: Callable[[Segment, int], bool]) -> Iterator[Candidate]:
        """Rollouts whose running attempt was a dead incarnation's and is ended now, oldest first.

        Free of input and output unless somebody is gone and something was learnt since the last scan.
        """
        state = (self._liveness.changes, self._board.listings)
        if not self._liveness.any_gone or self._scanned == state:
            return
        for segment, fanout in self._board.listed():
            for ordinal, attempt in sorted(fanout.running()):
                if not wanted(segment, ordinal):
                    continue
                candidate = Candidate(segment, fanout, ordinal)
                reason = self._liveness.gone(self._holder(candidate.ref, attempt))
                if reason is not None and self._end(candidate, attempt, reason):
                    yield candidate
        # Only now: a caller that stopped half-way goes on with the rest in its next scan.
        self._scanned = state

    def _end(self, candidate: Candidate, attempt: int, reason: EndReason) -> bool:
        """Ends a dead incarnation's attempt; False where its result counts after all."""
        ref, fanout = candidate.ref, candidate.fanout
        if read_token(self._paths.done_link(self._leg, ref)) is not None:
            fanout.saw_done(candidate.ordinal)
            return False
        holder = self._holder(ref, attempt)
        failure = Failure(
            attempt=attempt,
            reason=reason,
            failure_class=FailureClass.KILL,
            message=_MESSAGES[reason],
            incarnation=holder,
            node=self._liveness.host(holder),
        )
        write_end(self._paths.end_file(self._leg, ref, attempt), failure, ended_by=self._incarnation.id)
        fanout.saw_end(candidate.ordinal, attempt)
        return True

    def _holder(self, ref: RolloutRef, attempt: int) -> str:
        """Whose attempt it is; read once, since a claim never changes hands."""
        holder = self._holders.get((ref, attempt))
        if holder is None:
            holder = read_token(self._paths.claim_link(self._leg, ref, attempt)) or ""
            if holder:
                self._holders[ref, attempt] = holder
        return holder
