"""The trainer's view of a run: committed trajectories, each exactly once, from a position it can save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hpcroll.contract import RolloutRef
from hpcroll.errors import ConfigError, ShardError
from hpcroll.fs.mounts import filesystem_type, is_node_local
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.run_facts import read_run_facts
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.walk import ReadCounts
from hpcroll.shards.reading.batches import Batch
from hpcroll.shards.reading.feed import Following
from hpcroll.shards.reading.groups import Group, GroupCounts, GroupRule
from hpcroll.shards.reading.lookup import find_committed, find_group
from hpcroll.shards.reading.passes import Passes
from hpcroll.shards.reading.planner import StepSettings
from hpcroll.shards.reading.selection import Selection
from hpcroll.shards.reading.shuffle import EVERYTHING, Shuffle
from hpcroll.shards.reading.step import Settle, Step
from hpcroll.shards.reading.view import View

_TOKENS = frozenset({Column.TOKENS})
_TIMEOUT_S = 600.0
_LINGER_S = 60.0
"""For how long network file systems cache names and sizes, at most, as they are usually mounted."""


def open_run(
    path: str | Path,
    *,
    columns: Collection[str] | None = None,
    trainable: bool | None = None,
    status: Collection[str] | str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    policy: Collection[str] | str | None = None,
    min_version: int | None = None,
    max_version: int | None = None,
    trust_marks: bool = False,
    shuffle: int | None = None,
    window: int = 64,
) -> RunReader:
    """A reader of the run in directory `path`.

    `columns`: which of `tokens`, `record` and `text` to read (None: all); the summary is always there.
    `trainable`, `status`, `min_reward`, `max_reward`, `policy` (names) and the bounds on the versions of its
    sampled tokens, `min_version` and `max_version`, choose what is delivered. `trust_marks` believes the
    workers' commit logs instead of looking up the `done` name of each rollout: faster on a slow file system.
    `shuffle`: a seed; then groups (or rollouts, in an iteration over those) are drawn at random from the next
    `window` ones.
    Raises `ShardError` where there is no run, `ConfigError` for an unknown column or status.
    """
    paths = RunPaths(Path(path))
    selection = Selection.of(
        columns=columns,
        trainable=trainable,
        status=status,
        min_reward=min_reward,
        max_reward=max_reward,
        policy=policy,
        min_version=min_version,
        max_version=max_version,
        trust_marks=trust_marks,
    )
    order = None if shuffle is None else Shuffle(shuffle, window)
    return RunReader(View(paths, read_run_facts(paths), selection, order))


class RunReader:
    """Reads a run; not for several threads at once.

    A plain reader starts anew with every iteration, unless `load_state_dict` was called just before. A
    reader made by `follow` goes on where it stopped.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._passes = Passes(view)

    @property
    def run_id(self) -> str:
        return self._view.facts.run_id

    @property
    def counts(self) -> ReadCounts:
        """What the latest iteration met besides what it delivered."""
        return self._passes.store.counts

    @property
    def group_counts(self) -> GroupCounts:
        """What became of groups and rollouts that the latest iteration did not deliver."""
        return self._passes.session.assembly.counts

    def __iter__(self) -> Iterator[StoredTrajectory]:
        """Every committed trajectory that passes the filters, once each."""
        session = self._passes.begin(self._view.selection.columns, self._view.rule, grouped=False)
        return self._passes.alive(session.singles())

    def __len__(self) -> int:
        """How many trajectories are committed now and pass the filters."""
        selection = replace(self._view.selection, columns=frozenset())
        view = View(self._view.paths, self._view.facts, selection, part=self._view.part)
        return sum(1 for _ in RunReader(view))

    def get(self, rollout_id: str) -> StoredTrajectory:
        """The committed trajectory of one rollout, whatever the filters say.

        Raises `ShardError` where none is committed, `ShardCorruptError` where it is damaged.
        """
        try:
            ref = RolloutRef.parse(rollout_id)
        except ValueError as error:
            raise ShardError(str(error)) from error
        return find_committed(
            self._passes.store, self._view.facts.final_leg, ref, self._view.selection.columns
        )

    def group(self, group_id: str) -> Group:
        """What is committed of one group, by sample index, whatever the filters say.

        Raises `ShardError` where nothing is, `ShardCorruptError` where a member is damaged.
        """
        return find_group(
            self._passes.store, self._view.facts.final_leg, group_id, self._view.selection.columns
        )

    def groups(self, rule: str = "complete", *, min_usable: int | None = None) -> Iterator[Group]:
        """Groups in the order in which they become deliverable.

        `complete`: once all of a group is committed. `any`: those, and at the end of the stream the
        incomplete ones. `min_usable` = k: as soon as k of its rollouts are trainable with a valid reward;
        groups that end with fewer are counted, not delivered.
        """
        session = self._passes.begin(self._view.selection.columns, GroupRule.parse(rule, min_usable))
        return self._passes.alive(session.groups())

    def packed(self, max_tokens: int) -> Iterator[Batch]:
        """Batches of at most `max_tokens` tokens from the usable rollouts of groups, in group order.

        The groups are those of `follow(min_usable=...)`, complete ones otherwise. With several ranks each
        gets every `world`-th batch, and at the end an empty one where there are not enough. Raises
        `ShardError` for a segment that is longer than a batch.
        """
        settings = StepSettings(world=self._view.world, max_tokens=max_tokens)
        if self._view.world > 1:
            steps = self._passes.steps(settings, _TIMEOUT_S)
            return (batch for step in steps for batch in step.batches)
        session = self._passes.begin(_TOKENS, self._view.rule, max_tokens=max_tokens)
        return self._passes.alive(session.batches())

    def steps(
        self,
        *,
        max_tokens: int,
        groups: int | None = None,
        rollouts: int | None = None,
        drop_zero_variance: bool = False,
        last: Literal["keep", "drop"] = "keep",
        timeout_s: float = _TIMEOUT_S,
        settle: Settle | None = None,
    ) -> Iterator[Step]:
        """Optimiser steps of `groups` whole groups, or of whole groups with at least `rollouts` usable
        rollouts; of one full micro-batch for every rank where neither is given.

        `max_tokens`: of a micro-batch; a step has as few micro-batches as its rows fit into, balanced by
        tokens, and the same number on every rank. `drop_zero_variance`: groups whose usable rewards are
        all equal are counted and replaced by further ones. `last`: whether the stream's end delivers a step
        that is not full. `timeout_s`: how long a rank other than 0 waits without a sign of life from rank 0,
        and any rank for records that its mount does not show. `settle`: `run.policy.settle`, which rank 0
        then tells of each dropped group at once, so that under a window others may start in its place.

        Steps are numbered from 1 over the whole life of the trainer. Where `follow` was given a trainer
        name, each has a plan that never changes: whoever loads an older state, or none, gets the same steps
        again, up to the newest that was ever planned. Raises `ConfigError` for impossible settings,
        `ShardError` after `timeout_s` and for a segment longer than a micro-batch.
        """
        settings = StepSettings(
            world=self._view.world,
            max_tokens=max_tokens,
            groups=groups,
            rollouts=rollouts,
            drop_zero_variance=drop_zero_variance,
            last=last,
        )
        return self._passes.steps(settings, timeout_s, settle)

    def follow(
        self,
        *,
        poll_s: float = 0.2,
        stop: Callable[[], bool] = lambda: False,
        trainer: str | None = None,
        rank: int = 0,
        world: int = 1,
        min_usable: int | None = None,
        max_lag: int | None = None,
        hold_s: float = 3600.0,
        linger_s: float | None = None,
    ) -> RunReader:
        """A reader that waits for what is still to be committed, until `stop()` or the run is closed.

        `poll_s`: seconds between two looks at the shards; a quiet shard is looked at up to eight times
        less often. `min_usable` is the group rule of `packed` and `steps`. `max_lag`: rollouts whose oldest
        token is more than that many policy versions behind the newest published one are counted as stale,
        not delivered. `trainer` names the cursor: a state saved by one trainer is refused by another.
        Under a name it also says now and then how far it has come, and retention keeps level-0 shards that it
        has not read, until it has shown no life for `hold_s` seconds; whatever is deleted before is read from
        packs.

        `linger_s`: a closed run is read on until nothing came for so long, since a network mount may show its
        last records later than that it is closed; by default 60 seconds on a file system that several nodes
        may share, none on a local one.

        `rank` of `world`: the data-parallel ranks of one trainer, which take the same steps under its name.
        """
        if not 0 <= rank < world:
            raise ConfigError(f"follow: rank {rank} is not one of the {world} ranks from 0")
        if world > 1 and trainer is None:
            raise ConfigError(
                f"follow(rank={rank}, world={world}): several ranks meet under a trainer's name, so give it"
            )
        if trainer is not None and (not trainer or trainer.startswith(".")):
            raise ConfigError(
                f"follow: {trainer!r} names no trainer; it must not be empty or begin with a dot"
            )
        if self._view.part != EVERYTHING or self._view.shuffle is not None:
            raise ConfigError(
                "follow: a split or shuffled reader only reads what is there; use rank= and world="
            )
        if poll_s <= 0 or (max_lag is not None and max_lag < 0):
            raise ConfigError("follow: poll_s must be above 0 and max_lag 0 or more")
        if linger_s is None:
            linger_s = 0.0 if is_node_local(filesystem_type(self._view.paths.root)) else _LINGER_S
        view = replace(
            self._view,
            following=Following(poll_s, stop, linger_s),
            rule=GroupRule.parse("complete", min_usable),
            max_lag=max_lag,
            trainer=trainer,
            hold_s=hold_s,
            rank=rank,
            world=world,
        )
        return RunReader(view)

    def split(self, rank: int, world: int) -> RunReader:
        """A reader of part `rank` of `world` of the groups: every group is in one part, the same one each
        time. For finished runs, over data-parallel ranks and loader workers; parts of parts are fine."""
        if self._view.following is not None:
            raise ConfigError("split: a follower is not split; give follow rank= and world= instead")
        return RunReader(replace(self._view, part=self._view.part.split(rank, world)))

    def state_dict(self) -> dict[str, Any]:
        """The position after what was last delivered, as JSON; whoever loads it gets the rest, once each.

        Between steps it is the same on every rank, and may be loaded by another number of ranks.
        """
        return dict(self._passes.state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from `state`; raises `ConfigError` where it is not of this reader."""
        self._passes.load(state)
