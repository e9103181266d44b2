"""The trainer's view of a run: committed trajectories, each exactly once, from a position it can save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hpcroll.contract import RolloutRef
from hpcroll.errors import ConfigError, ShardError
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.run_facts import RunFacts, read_run_facts
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.walk import ReadCounts
from hpcroll.shards.reading.batches import Batch
from hpcroll.shards.reading.feed import Following
from hpcroll.shards.reading.freshness import Freshness
from hpcroll.shards.reading.groups import COMPLETE, Group, GroupCounts, GroupRule
from hpcroll.shards.reading.lookup import find_committed
from hpcroll.shards.reading.selection import Selection
from hpcroll.shards.reading.session import Session
from hpcroll.shards.reading.step import Step

_STATE_FORMAT = 1


def open_run(
    path: str | Path,
    *,
    columns: Collection[str] | None = None,
    trainable: bool | None = None,
    status: Collection[str] | str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    trust_marks: bool = False,
) -> RunReader:
    """A reader of the run in directory `path`.

    `columns`: which of `tokens`, `record` and `text` to read (None: all); the summary is always there.
    `trainable`, `status`, `min_reward`, `max_reward` choose what is delivered. `trust_marks` believes the
    workers' commit logs instead of looking up the `done` name of each rollout: faster on a slow file system.
    Raises `ShardError` where there is no run, `ConfigError` for an unknown column or status.
    """
    paths = RunPaths(Path(path))
    selection = Selection.of(
        columns=columns,
        trainable=trainable,
        status=status,
        min_reward=min_reward,
        max_reward=max_reward,
        trust_marks=trust_marks,
    )
    return RunReader(paths, read_run_facts(paths), selection)


class RunReader:
    """Reads a run; not for several threads at once.

    A plain reader starts anew with every iteration, unless `load_state_dict` was called just before. A
    reader made by `follow` goes on where it stopped.
    """

    def __init__(
        self,
        paths: RunPaths,
        facts: RunFacts,
        selection: Selection,
        *,
        following: Following | None = None,
        rule: GroupRule = COMPLETE,
        max_lag: int | None = None,
        trainer: str | None = None,
    ) -> None:
        self._paths = paths
        self._facts = facts
        self._selection = selection
        self._following = following
        self._rule = rule
        self._freshness = Freshness(paths, max_lag)
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self._session = self._new_session(selection.columns, rule)

    @property
    def run_id(self) -> str:
        return self._facts.run_id

    @property
    def counts(self) -> ReadCounts:
        """What the latest iteration met besides what it delivered."""
        return self._session.feed.counts

    @property
    def group_counts(self) -> GroupCounts:
        """What became of groups and rollouts that the latest iteration did not deliver."""
        return self._session.assembly.counts

    def __iter__(self) -> Iterator[StoredTrajectory]:
        """Every committed trajectory that passes the filters, once each."""
        return self._begin(self._selection.columns, self._rule).singles()

    def __len__(self) -> int:
        """How many trajectories are committed now and pass the filters."""
        counting = RunReader(self._paths, self._facts, replace(self._selection, columns=frozenset()))
        return sum(1 for _ in counting)

    def get(self, rollout_id: str) -> StoredTrajectory:
        """The committed trajectory of one rollout, whatever the filters say.

        Raises `ShardError` where none is committed, `ShardCorruptError` where it is damaged.
        """
        try:
            ref = RolloutRef.parse(rollout_id)
        except ValueError as error:
            raise ShardError(str(error)) from error
        return find_committed(self._paths, self._facts.final_leg, ref, self._selection.columns)

    def groups(self, rule: str = "complete", *, min_usable: int | None = None) -> Iterator[Group]:
        """Groups in the order in which they become deliverable.

        `complete`: once all of a group is committed. `any`: those, and at the end of the stream the
        incomplete ones. `min_usable` = k: as soon as k of its rollouts are trainable with a valid reward;
        groups that end with fewer are counted, not delivered.
        """
        return self._begin(self._selection.columns, GroupRule.parse(rule, min_usable)).groups()

    def packed(self, max_tokens: int) -> Iterator[Batch]:
        """Batches of at most `max_tokens` tokens from the usable rollouts of groups, in group order.

        The groups are those of `follow(min_usable=...)`, complete ones otherwise. Raises `ShardError` for
        a segment that is longer than a batch.
        """
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; it must be 1 or more")
        columns = frozenset({Column.TOKENS})
        return self._begin(columns, self._rule, max_tokens=max_tokens).packed()

    def steps(
        self,
        *,
        max_tokens: int,
        groups: int | None = None,
        rollouts: int | None = None,
        drop_zero_variance: bool = False,
        last: Literal["keep", "drop"] = "keep",
        timeout_s: float = 600.0,
    ) -> Iterator[Step]:
        """Optimiser steps of `groups` whole groups, or of at least `rollouts` usable rollouts.

        `max_tokens`: of a micro-batch; a step has as few micro-batches as its rows fit into, balanced by
        tokens, and the same number on every rank. `drop_zero_variance`: groups whose usable rewards are
        all equal are counted and replaced by further ones. `last`: whether the stream's end delivers a step
        that is not full. `timeout_s`: how long a rank other than 0 waits without a sign of life from rank 0,
        and any rank for records that its mount does not show.
        """
        raise NotImplementedError

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
    ) -> RunReader:
        """A reader that waits for what is still to be committed, until `stop()` or the run is closed.

        `poll_s`: seconds between two looks at the shards; a quiet shard is looked at up to eight times
        less often. `min_usable` is the group rule of `packed`. `max_lag`: rollouts whose oldest token is more
        than that many policy versions behind the newest published one are counted as stale, not delivered.
        `trainer` names the cursor: a state saved by one trainer is refused by another.
        """
        if (rank, world) != (0, 1):
            raise ConfigError(
                f"follow(rank={rank}, world={world}): reading one plan on several ranks is not implemented "
                "yet; read on rank 0 with world=1 and broadcast the batches"
            )
        if poll_s <= 0 or (max_lag is not None and max_lag < 0):
            raise ConfigError("follow: poll_s must be above 0 and max_lag 0 or more")
        return RunReader(
            self._paths,
            self._facts,
            self._selection,
            following=Following(poll_s, stop),
            rule=GroupRule.parse("complete", min_usable),
            max_lag=max_lag,
            trainer=trainer,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after what was last delivered, as JSON; whoever loads it gets the rest, once each."""
        if self._loaded is not None:
            return self._loaded
        identity = {"format": _STATE_FORMAT, "run_id": self._facts.run_id, "trainer": self._trainer}
        return {**identity, **self._session.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from `state`; raises `ConfigError` where it is not of this reader."""
        mine = (_STATE_FORMAT, self._facts.run_id, self._trainer)
        theirs = (state.get("format"), state.get("run_id"), state.get("trainer"))
        if mine != theirs:
            raise ConfigError(
                f"reader state of (format, run, trainer) {theirs} cannot be loaded by a reader of {mine}"
            )
        self._loaded = state

    def _begin(self, columns: frozenset[Column], rule: GroupRule, *, max_tokens: int = 1) -> Session:
        """A new pass: from the loaded state, else, when following, from where the last pass stopped."""
        state = self._loaded
        if state is None and self._following is not None:
            state = self._session.state()
        session = self._new_session(columns, rule, max_tokens=max_tokens)
        if state is not None:
            session.load(state)
        self._loaded = None
        self._session = session
        return session

    def _new_session(self, columns: frozenset[Column], rule: GroupRule, *, max_tokens: int = 1) -> Session:
        return Session(
            self._paths,
            self._facts,
            self._selection,
            columns=columns,
            following=self._following,
            rule=rule,
            freshness=self._freshness,
            max_tokens=max_tokens,
        )
