"""Every name of a run directory is spelt here, and nowhere else.

run.json                                      schema version, resolved config and digest, probe results
tasks/<segment>.jsonl.zst                     immutable manifest segment: one submission
workers/<incarnation>.json                    who a worker is: the token that claims link to
workers/<incarnation>.<i>.copy                the same token again, once the first nears LINK_MAX
workers/<incarnation>.<i>.final               the same, for an end that leaves the later legs nothing to do
workers/<incarnation>.ended                   written by the worker's parent once it is gone
beats/<incarnation>                           heartbeat, fixed width
claims/<leg>/<segment>/<n>>12>/<n>.a<k>       hard link to the claimant's workers/ file
claims/<leg>/<segment>/<n>>12>/<n>.a<k>.end   why attempt k ended without a result
done/<leg>/<segment>/<n>>12>/<n>              hard link to the committer's workers/ file
bundles/<leg>/<segment>/<n>.a<k>              what a leg hands to the next
journal/<incarnation>                         model calls, before the agent sees the reply
events/<incarnation>.jsonl                    stage transitions, timings, failures
shards/<incarnation>.<i>.shard | .log         trajectory records and their commit log
shards/dict.<g> | dict.<g>.copy               dictionaries that records are compressed with, kept twice
adopt/<incarnation>.<i>.<g>                   an adopter's index of a dead incarnation's shard
packs/<g>                                     manifest of the g-th packed shard: its file and inputs
packs/<g>-<token>.pack                        the data of a pack that was made to become the g-th
readers/<trainer>/cursor                      how far a named follower has come; replaced now and then
readers/<trainer>/<branch>/<n>                the plan of its n-th step: created once, the same for every rank
cancel/ drain/ hold/                          the operator's wishes, as names
policy/versions/<g>                           the g-th version that was published
policy/latest.<name>                          the newest version of policy <name>
policy/endpoints/<id>.json | .beat            inference servers and their heartbeats
policy/admission/<g> | now                    the g-th change of the pauses; the state in force
policy/gates/<incarnation>                    what a worker's gateway last did about them
policy/window/<g> | now                       the g-th change of the window; the state in force
policy/replenish/<pool>/<g>                   the g-th line of a pool's ledger
logs/                                         output of jobs and workers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from hpcroll.contract import RolloutRef

FANOUT_BITS = 12
"""Rollouts per directory, as a power of two."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The paths of the run in directory `root`."""

    root: Path

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def closed(self) -> Path:
        """Exists once the run is closed."""
        return self.root / "closed"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks"

    @property
    def workers(self) -> Path:
        return self.root / "workers"

    @property
    def beats(self) -> Path:
        return self.root / "beats"

    @property
    def claims(self) -> Path:
        return self.root / "claims"

    @property
    def done(self) -> Path:
        return self.root / "done"

    @property
    def bundles(self) -> Path:
        return self.root / "bundles"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def adopt(self) -> Path:
        return self.root / "adopt"

    @property
    def packs(self) -> Path:
        return self.root / "packs"

    @property
    def readers(self) -> Path:
        return self.root / "readers"

    @property
    def cancel(self) -> Path:
        return self.root / "cancel"

    @property
    def drain(self) -> Path:
        return self.root / "drain"

    @property
    def hold(self) -> Path:
        return self.root / "hold"

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def launches(self) -> Path:
        """One directory per launch: its record, its script and the output of its ranks."""
        return self.logs / "launches"

    def directories(self) -> tuple[Path, ...]:
        """Every directory that a run has from its creation on."""
        return (
            self.tasks,
            self.workers,
            self.beats,
            self.claims,
            self.done,
            self.bundles,
            self.journal,
            self.events,
            self.shards,
            self.adopt,
            self.packs,
            self.readers,
            self.cancel,
            self.drain,
            self.hold,
            self.policy,
            self.policy / "admission",
            self.policy / "endpoints",
            self.policy / "gates",
            self.policy / "versions",
            self.policy / "window",
            self.logs,
        )

    def segment_file(self, segment: str) -> Path:
        return self.tasks / f"{segment}.jsonl.zst"

    def worker_file(self, incarnation: str) -> Path:
        return self.workers / f"{incarnation}.json"

    def token_copy(self, incarnation: str, index: int, *, final: bool) -> Path:
        return self.workers / f"{incarnation}.{index}.{'final' if final else 'copy'}"

    def ended_file(self, incarnation: str) -> Path:
        return self.workers / f"{incarnation}.ended"

    def beat_file(self, incarnation: str) -> Path:
        return self.beats / incarnation

    def journal_file(self, incarnation: str) -> Path:
        return self.journal / incarnation

    def events_file(self, incarnation: str) -> Path:
        return self.events / f"{incarnation}.jsonl"

    def shard_file(self, incarnation: str, index: int) -> Path:
        return self.shards / f"{incarnation}.{index}.shard"

    def commit_log(self, incarnation: str, index: int) -> Path:
        return self.shards / f"{incarnation}.{index}.log"

    def dictionary_file(self, generation: int, *, copy: bool = False) -> Path:
        return self.shards / f"dict.{generation}{'.copy' if copy else ''}"

    def adoption_file(self, incarnation: str, index: int, generation: int) -> Path:
        return self.adopt / f"{incarnation}.{index}.{generation}"

    def pack_manifest(self, generation: int) -> Path:
        return self.packs / str(generation)

    def pack_file(self, generation: int, token: str) -> Path:
        return self.packs / f"{generation}-{token}.pack"

    def reader_directory(self, trainer: str) -> Path:
        return self.readers / quote(trainer, safe="")

    def reader_cursor(self, trainer: str) -> Path:
        return self.reader_directory(trainer) / "cursor"

    def plan_file(self, trainer: str, branch: str, step: int) -> Path:
        return self.reader_directory(trainer) / branch / str(step)

    def policy_version(self, generation: int) -> Path:
        return self.policy / "versions" / str(generation)

    def policy_latest(self, policy_name: str) -> Path:
        # A model name may hold slashes, as names on model hubs do.
        return self.policy / f"latest.{quote(policy_name, safe='')}"

    def endpoint_file(self, endpoint_id: str) -> Path:
        return self.policy / "endpoints" / f"{endpoint_id}.json"

    def endpoint_beat(self, endpoint_id: str) -> Path:
        return self.policy / "endpoints" / f"{endpoint_id}.beat"

    def admission_change(self, generation: int) -> Path:
        return self.policy / "admission" / str(generation)

    @property
    def admission_now(self) -> Path:
        return self.policy / "admission" / "now"

    def window_change(self, generation: int) -> Path:
        return self.policy / "window" / str(generation)

    @property
    def window_now(self) -> Path:
        return self.policy / "window" / "now"

    @property
    def pools(self) -> Path:
        return self.policy / "replenish"

    def pool_line(self, pool: str, number: int) -> Path:
        return self.pools / pool / str(number)

    @property
    def gates(self) -> Path:
        return self.policy / "gates"

    def gate_file(self, incarnation: str) -> Path:
        return self.gates / incarnation

    def fanout(self, ref: RolloutRef) -> str:
        return f"{ref.ordinal >> FANOUT_BITS}"

    def claim_directory(self, leg: str, ref: RolloutRef) -> Path:
        return self.root.joinpath("claims", leg, ref.segment, self.fanout(ref))

    def claim_link(self, leg: str, ref: RolloutRef, attempt: int) -> Path:
        return self.claim_directory(leg, ref) / f"{ref.ordinal}.a{attempt}"

    def end_file(self, leg: str, ref: RolloutRef, attempt: int) -> Path:
        return self.claim_directory(leg, ref) / f"{ref.ordinal}.a{attempt}.end"

    def done_directory(self, leg: str, ref: RolloutRef) -> Path:
        return self.root.joinpath("done", leg, ref.segment, self.fanout(ref))

    def done_link(self, leg: str, ref: RolloutRef) -> Path:
        return self.root.joinpath("done", leg, ref.segment, self.fanout(ref), str(ref.ordinal))

    def segment_directories(self, legs: Sequence[str], segment: str, size: int) -> list[Path]:
        """Every directory that the `size` rollouts of `segment` need; workers never create one."""
        refs = [RolloutRef(segment=segment, ordinal=n) for n in range(0, size, 1 << FANOUT_BITS)]
        directories = [self.bundles / leg / segment for leg in legs]
        for leg in legs:
            for ref in refs:
                directories += [self.claim_directory(leg, ref), self.done_directory(leg, ref)]
        return directories

    def bundle_file(self, leg: str, ref: RolloutRef, attempt: int) -> Path:
        return self.bundles / leg / ref.segment / f"{ref.ordinal}.a{attempt}"
