"""Seeded chaos in one process: lying errnos, stale listings, clocks that jump, workers declared dead alive.

Each seed is one history of several workers that interleave at the steps of the protocol. Whatever happens,
every rollout ends with exactly one result, and only delay is allowed to differ.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcroll.contract import EndReason, Failure
from hpcroll.errors import SpoolError
from hpcroll.fs import claim_name, list_names
from hpcroll.spool import Claim, Spool, mark_ended
from tests.spools import ONE_LEG, TWO_LEGS, Worker, check_exactly_one_result, make_spool, start_worker, submit

CODES = (errno.EPERM, errno.EEXIST, errno.EIO, errno.ESTALE)


class HostileFilesystem:
    """A caching network mount: answers lie, listings are old, and no two clocks agree."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._listings: dict[Path, list[list[str]]] = {}
        self._true_time = time.time

    def link(self, source: Path, name: Path) -> None:
        lie = self._chance.random()
        if lie < 0.1:
            raise OSError(self._chance.choice(CODES), "refused, and not done")
        try:
            os.link(source, name)
        except OSError as error:
            raise OSError(self._chance.choice(CODES), "contested") from error
        if lie < 0.3:
            raise OSError(self._chance.choice(CODES), "done, and denied")

    def claim_name(self, token_file: Path, name: Path) -> bool:
        return claim_name(token_file, name, link=self.link)

    def list_names(self, directory: Path) -> list[str]:
        """The listing of now, or one of the last ones, in no order."""
        seen = self._listings.setdefault(directory, [])
        seen.append(list_names(directory))
        listing = list(self._chance.choice(seen[-4:]))
        self._chance.shuffle(listing)
        return listing

    def time(self) -> float:
        return self._true_time() + self._chance.uniform(-3600, 3600)


class History:
    """One interleaving of workers."""

    def __init__(self, spool: Spool, chance: random.Random) -> None:
        self._spool = spool
        self._chance = chance
        self._workers: list[Worker] = []
        self._claims: list[tuple[Worker, Claim]] = []
        self.committed: dict[str, str] = {}

    def run(self) -> None:
        while not self._finished():
            if len(self._workers) < 4:
                self._workers.append(start_worker(self._spool, leg=self._rarest_leg()))
            step = self._chance.choices((self.claim, self.end, self.declare_dead), (10, 10, 1))[0]
            step()

    def _rarest_leg(self) -> str:
        """Every leg needs a worker, or nothing ever ends."""
        legs = Counter(dict.fromkeys(self._spool.config.leg_names, 0))
        legs.update(worker.incarnation.leg for worker in self._workers)
        return min(legs, key=lambda leg: legs[leg])

    def claim(self) -> None:
        worker = self._chance.choice(self._workers)
        claim = worker.claims.next()
        if claim is not None:
            held = [other.rollout.ref for owner, other in self._claims if owner is worker]
            assert claim.rollout.ref not in held, "never twice at once by one incarnation"
            self._claims.append((worker, claim))

    def end(self) -> None:
        """One of the running attempts ends, also one that was taken over long ago."""
        if not self._claims:
            return
        worker, claim = self._claims.pop(self._chance.randrange(len(self._claims)))
        how = self._chance.random()
        if how < 0.1:
            claim.release()
        elif how < 0.2:
            claim.fail(Failure(attempt=claim.attempt, reason=EndReason.INFRA))
        elif how < 0.25:
            mark_ended(self._spool.paths, worker.id)
            self._forget(worker)
        else:
            self._commit(worker, claim)

    def _commit(self, worker: Worker, claim: Claim) -> None:
        worker.write_result(claim, final=worker.is_last_leg or self._chance.random() < 0.1)
        try:
            won = claim.commit()
        except SpoolError:
            # Its answer never came: a worker ends then, and its rollout is taken over.
            mark_ended(self._spool.paths, worker.id)
            self._forget(worker)
            return
        if won and (worker.is_last_leg or claim.recorded):
            ref = str(claim.rollout.ref)
            assert self.committed.setdefault(ref, worker.id) == worker.id, f"two results of {ref}"

    def declare_dead(self) -> None:
        """The word of a parent or a scheduler that is wrong: the worker goes on all the same."""
        mark_ended(self._spool.paths, self._chance.choice(self._workers).id)

    def _forget(self, worker: Worker) -> None:
        self._workers = [other for other in self._workers if other is not worker]
        self._claims = [(owner, claim) for owner, claim in self._claims if owner is not worker]

    def _finished(self) -> bool:
        leg = self._spool.config.leg_names[-1]
        counts = self._spool.exact_counts()
        return counts.done[leg] == counts.total


@pytest.mark.parametrize("legs", [ONE_LEG, TWO_LEGS], ids=["one leg", "two legs"])
@pytest.mark.parametrize("seed", range(8))
def test_chaos_ends_with_one_result_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legs: Sequence[Sequence[str]], seed: int
) -> None:
    chance = random.Random(seed)
    hostile = HostileFilesystem(chance)
    spool = make_spool(tmp_path, legs=legs, beat_s=0.001, silence_s=600.0)
    submit(spool, tasks=4, samples=2)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.incarnation.claim_name", hostile.claim_name)
        patch.setattr("hpcroll.spool.fanout.list_names", hostile.list_names)
        patch.setattr("hpcroll.spool.liveness.list_names", hostile.list_names)
        patch.setattr("time.time", hostile.time)
        history = History(spool, chance)
        history.run()
    check_exactly_one_result(spool)
    for ref, winner in history.committed.items():
        assert spool.done_token(next(r for r in spool.segments()[0].refs() if str(r) == ref)) == winner
