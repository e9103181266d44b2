"""The trainer's view of a run: committed trajectories, each exactly once, from a position it can save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpcroll.contract import RolloutRef
from hpcroll.errors import ConfigError, ShardError
from hpcroll.fs.mounts import filesystem_type, is_node_local
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.run_facts import RunFacts, read_run_facts
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.walk import ReadCounts
from hpcroll.shards.reading.batches import Batch
from hpcroll.shards.reading.feed import Following
from hpcroll.shards.reading.freshness import Freshness
from hpcroll.shards.reading.groups import COMPLETE, Group, GroupCounts, GroupRule
from hpcroll.shards.reading.lookup import find_committed, find_group
from hpcroll.shards.reading.plan import PlanFiles, branch_name
from hpcroll.shards.reading.planner import StepSettings
from hpcroll.shards.reading.presence import Presence
from hpcroll.shards.reading.selection import Selection
from hpcroll.shards.reading.session import EVERYTHING, Session
from hpcroll.shards.reading.shuffle import Part, Shuffle
from hpcroll.shards.reading.step import Step, StepCounts
from hpcroll.shards.reading.stepping import Position, Stepping
from hpcroll.shards.reading.store import Store

T = TypeVar("T")
_STATE_FORMAT = 2
_LINGER_S = 60.0
"""For how long network file systems cache names and sizes, at most, as they are usually mounted."""
_TOKENS = frozenset({Column.TOKENS})


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
    return RunReader(paths, read_run_facts(paths), selection, shuffle=order)


def _linger_s(paths: RunPaths) -> float:
    return 0.0 if is_node_local(filesystem_type(paths.root)) else _LINGER_S


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
        rank: int = 0,
        world: int = 1,
        presence: Presence | None = None,
        part: Part = EVERYTHING,
        shuffle: Shuffle | None = None,
    ) -> None:
        self._paths = paths
        self._facts = facts
        self._selection = selection
        self._following = following
        self._rule = rule
        self._max_lag = max_lag
        self._freshness = Freshness(paths, max_lag)
        self._trainer = trainer
        self._rank = rank
        self._world = world
        self._store = Store(paths, ReadCounts())
        self._presence = presence
        self._part = part
        self._shuffle = shuffle
        self._loaded: dict[str, Any] | None = None
        self._session = self._new_session(selection.columns, rule)
        self._position: Position | None = None

    @property
    def run_id(self) -> str:
        return self._facts.run_id

    @property
    def counts(self) -> ReadCounts:
        """What the latest iteration met besides what it delivered."""
        return self._store.counts

    @property
    def group_counts(self) -> GroupCounts:
        """What became of groups and rollouts that the latest iteration did not deliver."""
        return self._session.assembly.counts

    def __iter__(self) -> Iterator[StoredTrajectory]:
        """Every committed trajectory that passes the filters, once each."""
        return self._alive(self._begin(self._selection.columns, self._rule, grouped=False).singles())

    def __len__(self) -> int:
        """How many trajectories are committed now and pass the filters."""
        selection = replace(self._selection, columns=frozenset())
        counting = RunReader(self._paths, self._facts, selection, part=self._part)
        return sum(1 for _ in counting)

    def get(self, rollout_id: str) -> StoredTrajectory:
        """The committed trajectory of one rollout, whatever the filters say.

        Raises `ShardError` where none is committed, `ShardCorruptError` where it is damaged.
        """
        try:
            ref = RolloutRef.parse(rollout_id)
        except ValueError as error:
            raise ShardError(str(error)) from error
        return find_committed(self._store, self._facts.final_leg, ref, self._selection.columns)

    def group(self, group_id: str) -> Group:
        """What is committed of one group, by sample index, whatever the filters say.

        Raises `ShardError` where nothing is, `ShardCorruptError` where a member is damaged.
        """
        return find_group(self._store, self._facts.final_leg, group_id, self._selection.columns)

    def groups(self, rule: str = "complete", *, min_usable: int | None = None) -> Iterator[Group]:
        """Groups in the order in which they become deliverable.

        `complete`: once all of a group is committed. `any`: those, and at the end of the stream the
        incomplete ones. `min_usable` = k: as soon as k of its rollouts are trainable with a valid reward;
        groups that end with fewer are counted, not delivered.
        """
        return self._alive(self._begin(self._selection.columns, GroupRule.parse(rule, min_usable)).groups())

    def packed(self, max_tokens: int) -> Iterator[Batch]:
        """Batches of at most `max_tokens` tokens from the usable rollouts of groups, in group order.

        The groups are those of `follow(min_usable=...)`, complete ones otherwise. With several ranks each
        gets every `world`-th batch, and at the end an empty one where there are not enough. Raises
        `ShardError` for a segment that is longer than a batch.
        """
        settings = StepSettings(world=self._world, max_tokens=max_tokens)
        if self._world > 1:
            return (batch for step in self._steps(settings, 600.0) for batch in step.batches)
        return self._alive(self._begin(_TOKENS, self._rule, max_tokens=max_tokens).batches())

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
        """Optimiser steps of `groups` whole groups, or of whole groups with at least `rollouts` usable
        rollouts; of one full micro-batch for every rank where neither is given.

        `max_tokens`: of a micro-batch; a step has as few micro-batches as its rows fit into, balanced by
        tokens, and the same number on every rank. `drop_zero_variance`: groups whose usable rewards are
        all equal are counted and replaced by further ones. `last`: whether the stream's end delivers a step
        that is not full. `timeout_s`: how long a rank other than 0 waits without a sign of life from rank 0,
        and any rank for records that its mount does not show.

        Steps are numbered from 1 over the whole life of the trainer. Where `follow` was given a trainer
        name, each has a plan that never changes: whoever loads an older state, or none, gets the same steps
        again, up to the newest that was ever planned. Raises `ConfigError` for impossible settings,
        `ShardError` after `timeout_s` and for a segment longer than a micro-batch.
        """
        settings = StepSettings(
            world=self._world,
            max_tokens=max_tokens,
            groups=groups,
            rollouts=rollouts,
            drop_zero_variance=drop_zero_variance,
            last=last,
        )
        return self._steps(settings, timeout_s)

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
        if self._part != EVERYTHING or self._shuffle is not None:
            raise ConfigError(
                "follow: a split or shuffled reader only reads what is there; use rank= and world="
            )
        if poll_s <= 0 or (max_lag is not None and max_lag < 0):
            raise ConfigError("follow: poll_s must be above 0 and max_lag 0 or more")
        return RunReader(
            self._paths,
            self._facts,
            self._selection,
            following=Following(poll_s, stop, _linger_s(self._paths) if linger_s is None else linger_s),
            rule=GroupRule.parse("complete", min_usable),
            max_lag=max_lag,
            trainer=trainer,
            rank=rank,
            world=world,
            presence=None if trainer is None else Presence(self._paths, trainer, hold_s=hold_s),
        )

    def split(self, rank: int, world: int) -> RunReader:
        """A reader of part `rank` of `world` of the groups: every group is in one part, the same one each
        time. For finished runs, over data-parallel ranks and loader workers; parts of parts are fine."""
        if self._following is not None:
            raise ConfigError("split: a follower is not split; give follow rank= and world= instead")
        return RunReader(
            self._paths,
            self._facts,
            self._selection,
            rule=self._rule,
            part=self._part.split(rank, world),
            shuffle=self._shuffle,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after what was last delivered, as JSON; whoever loads it gets the rest, once each.

        Between steps it is the same on every rank, and may be loaded by another number of ranks.
        """
        if self._loaded is not None:
            return self._loaded
        identity = {**self._identity(), "format": _STATE_FORMAT}
        if self._position is not None:
            return {**identity, **self._position.to_json()}
        return {**identity, "session": self._session.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from `state`; raises `ConfigError` where it is not of this reader."""
        mine = {"format": _STATE_FORMAT, **self._identity()}
        theirs = {name: state.get(name) for name in mine}
        if mine != theirs:
            raise ConfigError(f"reader state of {theirs} cannot be loaded by a reader of {mine}")
        self._loaded = state

    def _identity(self) -> dict[str, Any]:
        """What a state must agree with: its stream and the order of it."""
        shuffle = None if self._shuffle is None else [self._shuffle.seed, self._shuffle.window]
        return {
            "run_id": self._facts.run_id,
            "trainer": self._trainer,
            "part": [self._part.index, self._part.count],
            "shuffle": shuffle,
        }

    def _steps(self, settings: StepSettings, timeout_s: float) -> Iterator[Step]:
        position = self._position_for(settings)
        files = None
        if self._trainer is not None and self._following is not None:
            trainer = self._trainer

            def files(branch: str) -> PlanFiles:
                return PlanFiles(self._paths, trainer, branch)

        stepping = Stepping(
            rank=self._rank,
            settings=settings,
            files=files,
            new_session=lambda state: self._resume(frozenset(), state, max_tokens=settings.max_tokens),
            store=self._store,
            stop=self._following.stop if self._following is not None else lambda: False,
            timeout_s=timeout_s,
            sign=self._presence.sign if self._presence is not None else lambda: None,
        )
        return self._alive(stepping.steps(position))

    def _position_for(self, settings: StepSettings) -> Position:
        """Where the next step follows: in the branch of the state, or in a new one under other settings."""
        state = self._loaded if self._loaded is not None else self.state_dict()
        how = {
            **settings.to_json(),
            "min_usable": self._rule.min_usable,
            "partial": self._rule.partial,
            "max_lag": self._max_lag,
            "selection": self._selection.to_json(),
        }
        number, session = int(state.get("step", 0)), state["session"]
        if self._following is None and self._loaded is None:
            number, session, state = 0, self._new_session(frozenset(), self._rule).state(), {}
        known = state.get("settings") == how
        branch = state["branch"] if known else branch_name(how, number, session)
        counts = StepCounts(**state.get("counts", {}))
        self._loaded = None
        self._position = Position(branch, how, number, session, counts)
        self._store.counts = ReadCounts()
        return self._position

    def _alive(self, items: Iterator[T]) -> Iterator[T]:
        """The same items; a named follower beats on the way."""
        return items if self._presence is None else map(self._beat_after, items)

    def _beat_after(self, item: T) -> T:
        self._beat()
        return item

    def _beat(self) -> None:
        """Says that the follower lives and how far it has come, where it has a name and this is rank 0."""
        if self._presence is not None and self._rank == 0:
            position = self._position
            self._presence.beat(self._session.state if position is None else lambda: position.session)

    def _begin(
        self, columns: frozenset[Column], rule: GroupRule, *, grouped: bool = True, max_tokens: int = 1
    ) -> Session:
        """A new pass: from the loaded state, else, when following, from where the last pass stopped."""
        state = self._loaded
        if state is None and self._following is not None:
            state = self.state_dict()
        self._loaded = self._position = None
        self._store.counts = ReadCounts()
        session = self._new_session(columns, rule, grouped=grouped, max_tokens=max_tokens)
        if state is not None:
            session.load(state["session"])
        self._session = session
        return session

    def _resume(self, columns: frozenset[Column], state: Mapping[str, Any], *, max_tokens: int) -> Session:
        session = self._new_session(columns, self._rule, max_tokens=max_tokens)
        session.load(state)
        self._session = session
        return session

    def _new_session(
        self, columns: frozenset[Column], rule: GroupRule, *, grouped: bool = True, max_tokens: int = 1
    ) -> Session:
        following = self._following
        if following is not None and self._presence is not None:
            following = replace(following, looked=self._beat)
        return Session(
            self._store,
            self._facts,
            self._selection,
            columns=columns,
            following=following,
            rule=rule,
            freshness=self._freshness,
            grouped=grouped,
            part=self._part,
            shuffle=self._shuffle,
            max_tokens=max_tokens,
        )
