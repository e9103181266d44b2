"""The passes of one reader over its run, one at a time, and the position that outlives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hpcroll.errors import ConfigError
from hpcroll.shards.format.stored import Column
from hpcroll.shards.level0.walk import ReadCounts
from hpcroll.shards.reading.freshness import Freshness
from hpcroll.shards.reading.groups import GroupRule
from hpcroll.shards.reading.plan import branch_name
from hpcroll.shards.reading.planner import StepSettings
from hpcroll.shards.reading.presence import Presence
from hpcroll.shards.reading.session import Session
from hpcroll.shards.reading.step import Settle, Step, StepCounts
from hpcroll.shards.reading.stepping import Position, Stepping
from hpcroll.shards.reading.store import Store
from hpcroll.shards.reading.view import View

T = TypeVar("T")
_TOKENS = frozenset({Column.TOKENS})
_STATE_FORMAT = 2


class Passes:
    """Each `begin` or `steps` is a new pass: from the state that was loaded, else, for a follower, from where
    the one before stopped, else from the start."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.store = Store(view.paths, ReadCounts())
        self._freshness = Freshness(view.paths, view.max_lag)
        self._presence = (
            None if view.trainer is None else Presence(view.paths, view.trainer, hold_s=view.hold_s)
        )
        self._loaded: Mapping[str, Any] | None = None
        self._position: Position | None = None
        """Where a pass in steps stands; None in other passes."""
        self.session = self._new_session(view.selection.columns, view.rule)

    def begin(
        self, columns: frozenset[Column], rule: GroupRule, *, grouped: bool = True, max_tokens: int = 1
    ) -> Session:
        """A new pass with `columns`."""
        state = self._starting_state()
        self._loaded = self._position = None
        self.store.counts = ReadCounts()
        session = self._new_session(columns, rule, grouped=grouped, max_tokens=max_tokens)
        if state is not None:
            session.load(state["session"])
        self.session = session
        return session

    def steps(self, settings: StepSettings, timeout_s: float, settle: Settle | None = None) -> Iterator[Step]:
        """A new pass in steps."""
        following, presence = self._view.following, self._presence
        position = self._begin_steps(settings)

        def resume(state: Mapping[str, Any]) -> Session:
            self.session = self._new_session(
                _TOKENS, self._view.rule, summaries=True, max_tokens=settings.max_tokens
            )
            self.session.load(state)
            return self.session

        stepping = Stepping(
            rank=self._view.rank,
            settings=settings,
            files=self._view.plan_files,
            new_session=resume,
            store=self.store,
            stop=following.stop if following is not None else lambda: False,
            timeout_s=timeout_s,
            sign=presence.sign if presence is not None else lambda: None,
            settle=settle,
        )
        return self.alive(stepping.steps(position))

    def alive(self, items: Iterator[T]) -> Iterator[T]:
        """The same items; a named follower beats on the way, and says where it stands at the end."""
        return items if self._presence is None else self._beating(items, self._presence)

    def state(self) -> Mapping[str, Any]:
        """The position after what was last delivered."""
        if self._loaded is not None:
            return self._loaded
        identity = {"format": _STATE_FORMAT, **self._view.identity()}
        if self._position is not None:
            return {**identity, **self._position.to_json()}
        return {**identity, "session": self.session.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on from `state`; raises `ConfigError` where it is not of this reader."""
        mine = {"format": _STATE_FORMAT, **self._view.identity()}
        theirs = {name: state.get(name) for name in mine}
        if mine != theirs:
            raise ConfigError(f"reader state of {theirs} cannot be loaded by a reader of {mine}")
        self._loaded = state

    def _starting_state(self) -> Mapping[str, Any] | None:
        return self.state() if self._loaded is not None or self._view.following is not None else None

    def _begin_steps(self, settings: StepSettings) -> Position:
        """Where the next step follows: in the branch of the state, or in a new one under other settings."""
        how = self._view.planned_under(settings)
        state = self._starting_state()
        if state is None:
            state = {"session": self._new_session(frozenset(), self._view.rule).state()}
        number, session = int(state.get("step", 0)), state["session"]
        known = state.get("settings") == how
        branch = state["branch"] if known else branch_name(how, number, session)
        counts = StepCounts(**state.get("counts", {}))
        self._loaded = None
        self._position = Position(branch, how, number, session, counts)
        self.store.counts = ReadCounts()
        return self._position

    def _beating(self, items: Iterator[T], presence: Presence) -> Iterator[T]:
        for item in items:
            self._beat()
            yield item
        if self._view.rank == 0:
            presence.rest(self._where)

    def _beat(self) -> None:
        """Says that the follower lives and how far it has come, where it has a name and this is rank 0."""
        if self._presence is not None and self._view.rank == 0:
            self._presence.beat(self._where)

    def _where(self) -> Mapping[str, Any]:
        return self.session.state() if self._position is None else self._position.session

    def _new_session(
        self,
        columns: frozenset[Column],
        rule: GroupRule,
        *,
        grouped: bool = True,
        summaries: bool = False,
        max_tokens: int = 1,
    ) -> Session:
        following = self._view.following
        if following is not None and self._presence is not None:
            following = replace(following, looked=self._beat)
        return Session(
            self.store,
            self._view.facts,
            self._view.selection,
            columns=columns,
            following=following,
            rule=rule,
            freshness=self._freshness,
            grouped=grouped,
            summaries=summaries,
            part=self._view.part,
            shuffle=self._view.shuffle,
            max_tokens=max_tokens,
        )
