"""What the leg before left: which attempt won it, and whether the rollout ended there for good."""

from __future__ import annotations

from dataclasses import dataclass

from hpcroll.contract import RolloutRef
from hpcroll.errors import CorruptRecordError
from hpcroll.fs import RunPaths, claim_name, read_token
from hpcroll.spool.incarnation import WorkerInfo, read_worker


@dataclass(frozen=True, slots=True)
class PreviousWinner:
    """The incarnation that committed rollout `ref` in leg `leg`."""

    paths: RunPaths
    leg: str
    ref: RolloutRef
    info: WorkerInfo

    @property
    def final(self) -> bool:
        """It committed a record there: the rollout has ended for all legs."""
        return self.info.final

    def spread_to(self, leg: str) -> None:
        """Says so in `leg`, on behalf of its committer: the record was durable before `done` was linked."""
        claim_name(self.paths.done_link(self.leg, self.ref), self.paths.done_link(leg, self.ref))

    def attempt(self) -> int:
        """The number of the attempt that won.

        It is the winner's latest: an incarnation claims a rollout again only after an attempt that wrote no
        record or bundle, and never after one that did.
        """
        found, attempt = None, 1
        while (owner := read_token(self.paths.claim_link(self.leg, self.ref, attempt))) is not None:
            if owner == self.info.incarnation:
                found = attempt
            attempt += 1
        if found is None:
            raise CorruptRecordError(
                f"rollout {self.ref}: leg {self.leg} was done by {self.info.incarnation}, of which no claim "
                f"is left in {self.paths.claim_directory(self.leg, self.ref)}; names of an open run must stay"
            )
        return found


def previous_winner(
    paths: RunPaths, legs: tuple[str, ...], leg: str, ref: RolloutRef
) -> PreviousWinner | None:
    """Who won the leg before `leg`; None for the first leg.

    Raises `CorruptRecordError` where the leg before is not done, which its listing said it was.
    """
    index = legs.index(leg)
    if index == 0:
        return None
    previous = legs[index - 1]
    info = read_worker(paths.done_link(previous, ref))
    if info is None:
        raise CorruptRecordError(
            f"{paths.done_link(previous, ref)} was listed and is gone; names of an open run must stay"
        )
    return PreviousWinner(paths, previous, ref, info)
