"""Exports a run: what is in a part is decided and made durable first, then its files are written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from glob import escape as glob_escape
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcroll.config.load import describe
from hpcroll.errors import ConfigError
from hpcroll.exporters.base import Bridge, Bridged, Exporter, GroupSlice, Part, Unit
from hpcroll.exporters.ledger import Decision, Ledger
from hpcroll.fs import RunPaths, make_directories, publish, read_fresh
from hpcroll.fs.atomic import TEMPORARY_PREFIX
from hpcroll.plugins import Family, load
from hpcroll.policy import PolicyRegistry
from hpcroll.shards import RunReader, open_run

PART_TOKENS = 1 << 20
"""Tokens at which a part is closed, where its format does not count groups."""
_FLUSH_S = 5.0
"""A follower closes a part that has waited this long for more, in seconds."""


@dataclass(frozen=True, slots=True)
class ExportFilters:
    """Which rollouts are exported."""

    trainable: bool = False
    """Only trainable ones."""
    groups: str | None = None
    """`complete` or `any`; None: what the format needs."""
    min_usable: int | None = None
    """Groups as soon as so many of their rollouts are usable."""
    max_lag: int | None = None
    """Only rollouts whose oldest token is at most so many versions behind; when following."""


@dataclass(slots=True)
class ExportCounts:
    """What was exported into a directory so far, over all calls."""

    parts: int = 0
    groups: int = 0
    """0 where rollouts are handed out one by one."""
    rollouts: int = 0
    usable: int = 0
    """Rollouts that are trainable with a valid reward; formats for training hold no others."""
    tokens: int = 0


def make_exporter(name: str, options: Mapping[str, Any] | None = None) -> Exporter:
    """The exporter `name` (an entry point, or `package.module:Class`) with `options`.

    Raises `PluginError` for an unknown one, `ConfigError` for wrong options.
    """
    kind: type[Exporter] = load(Family.EXPORTER, name)
    try:
        return kind(kind.Options.model_validate(dict(options or {})))
    except ValidationError as error:
        known = ", ".join(kind.Options.model_fields) or "none"
        raise ConfigError(f"options of exporter {name}: {describe(error)}; known: {known}") from error


def export_run(
    run_dir: Path | str,
    to: str,
    out: Path | str,
    *,
    options: Mapping[str, Any] | None = None,
    filters: ExportFilters | None = None,
    follow: bool = False,
    part_tokens: int = PART_TOKENS,
    poll_s: float = 0.2,
    stop: Callable[[], bool] = lambda: False,
) -> ExportCounts:
    """Exports run `run_dir` in format `to` into directory `out`; returns what is in it now.

    A call goes on where the last one stopped, wherever that one was killed: each rollout is in exactly one
    part. Without `follow` it exports what is committed now, with it until `stop()` or the run is closed.
    Raises `ConfigError` for wrong options and where `out` holds another export, `ShardError` for a damaged
    run.
    """
    wanted = filters or ExportFilters()
    exporter = make_exporter(to, options)
    _check(exporter, wanted, follow)
    given = dict(options or {})
    reader = open_run(run_dir, columns=exporter.columns, trainable=True if wanted.trainable else None)
    identity = {"run_id": reader.run_id, "format": to, "options": given, **asdict(wanted)}
    ledger = Ledger(Path(out), identity)
    bridge = None
    if follow and isinstance(exporter, Bridged):
        bridge = exporter.bridge(Path(out), _policy_of(Path(run_dir)))
    export = _Export(Path(out), exporter, reader, ledger, wanted, part_tokens, poll_s, stop, bridge)
    return export.run(follow=follow)


def _policy_of(run_dir: Path) -> PolicyRegistry:
    paths = RunPaths(run_dir)
    run = json.loads(read_fresh(paths.run_json) or b"{}")
    return PolicyRegistry(paths, name=run["config"]["model"]["name"])


def _check(exporter: Exporter, filters: ExportFilters, follow: bool) -> None:
    if filters.groups not in (None, "complete", "any"):
        raise ConfigError(f"groups {filters.groups!r} is unknown; choose complete or any, or give min_usable")
    if filters.max_lag is not None and not follow:
        raise ConfigError("max_lag needs follow: what is behind whom depends on when it is read")
    if exporter.groups_per_part is not None and exporter.groups_per_part < 1:
        raise ConfigError("a part has at least one group")


@dataclass(slots=True)
class _Export:
    """One call of `export_run`."""

    out: Path
    exporter: Exporter
    reader: RunReader
    ledger: Ledger
    filters: ExportFilters
    part_tokens: int
    poll_s: float
    stop: Callable[[], bool]
    bridge: Bridge | None
    counts: ExportCounts = field(default_factory=ExportCounts)
    _held: list[GroupSlice] = field(default_factory=list)
    _held_tokens: int = 0
    _held_since: float = 0.0
    _flushing: bool = False

    def run(self, *, follow: bool) -> ExportCounts:
        last = self.ledger.last()
        reader = self.reader
        if follow:
            reader = reader.follow(poll_s=self.poll_s, stop=self._asked, max_lag=self.filters.max_lag)
        if last is not None:
            self.counts = ExportCounts(**last.totals)
            self._restore()
            self._sweep(last.number)
            assert last.state is not None
            reader.load_state_dict(last.state)
        while True:
            self._flushing = False
            self._wait_for_trainer()
            for slice_ in () if self.stop() else self._source(reader):
                self._hold(slice_)
                if self._is_full():
                    self._write(reader.state_dict())
                    self._wait_for_trainer()
                if self.stop():
                    break
            if self._is_worth_it() and (self._flushing or not self.stop()):
                self._write(reader.state_dict())
            if not self._flushing or self.stop():
                return self.counts

    def _source(self, reader: RunReader) -> Iterator[GroupSlice]:
        filters = self.filters
        if not self._is_grouped():
            for stored in reader:
                yield GroupSlice(stored.group_id, (stored,))
            return
        for group in reader.groups(filters.groups or "complete", min_usable=filters.min_usable):
            yield GroupSlice(group.group_id, group.members)

    def _is_grouped(self) -> bool:
        asked = self.filters.groups is not None or self.filters.min_usable is not None
        return asked or self.exporter.unit is Unit.GROUP

    def _asked(self) -> bool:
        """Asked by the reader between two looks: also the moment to hear what the trainer says."""
        if self.bridge is not None:
            self.bridge.may_go_on(self.counts.parts)
            self._restore()
        waited_s = time.monotonic() - self._held_since
        may_flush = self.exporter.groups_per_part is None and self.filters.groups != "any"
        if self._held and may_flush and waited_s >= _FLUSH_S:
            self._flushing = True
        return self._flushing or self.stop()

    def _hold(self, slice_: GroupSlice) -> None:
        if not self._held:
            self._held_since = time.monotonic()
        self._held.append(slice_)
        self._held_tokens += sum(sum(member.summary.lengths) for member in slice_.members)

    def _is_full(self) -> bool:
        wanted = self.exporter.groups_per_part
        if wanted is None:
            return self._held_tokens >= self.part_tokens and self._is_worth_it()
        return sum(_is_usable(slice_) for slice_ in self._held) >= wanted

    def _is_worth_it(self) -> bool:
        """Whether what is held makes a part: no format has rows for groups without a usable rollout alone."""
        if self.exporter.unit is Unit.ROLLOUT:
            return bool(self._held)
        return any(_is_usable(slice_) for slice_ in self._held)

    def _write(self, state: dict[str, Any]) -> None:
        part = Part(self.counts.parts, self.reader.run_id, tuple(self._held))
        members = list(part.members)
        self.counts.parts += 1
        self.counts.groups += len(part.groups) if self._is_grouped() else 0
        self.counts.rollouts += len(members)
        self.counts.usable += sum(member.summary.usable for member in members)
        self.counts.tokens += self._held_tokens
        files = dict(self.exporter.files(part))  # before it is decided: what cannot be written is not decided
        groups = tuple((g.group_id, tuple(m.rollout_id for m in g.members)) for g in part.groups)
        self.ledger.decide(Decision(part.number, groups, asdict(self.counts), state))
        self._publish(files)
        self._held, self._held_tokens = [], 0

    def _publish(self, files: Mapping[str, bytes]) -> None:
        make_directories(sorted({(self.out / name).parent for name in files}))
        for name, data in files.items():
            publish(self.out / name, data)

    def _restore(self) -> None:
        """Writes files again that were decided and are not there: the newest part's, and with a bridge those
        of every part that the trainer has not read."""
        for number in range(self.counts.parts - 1, -1, -1):
            if self.bridge is None:
                if number < self.counts.parts - 1:
                    return
            elif not self.bridge.unread(number):
                return
            if not self._is_there(number):
                self._publish(dict(self.exporter.files(self._part(number))))

    def _sweep(self, number: int) -> None:
        """Removes what a killed call left of files of part `number`, which are there by now."""
        names = self.exporter.names(number) or tuple(n for n, _ in self.exporter.files(self._part(number)))
        for path in (self.out / name for name in names):
            for left in path.parent.glob(f"{TEMPORARY_PREFIX}{glob_escape(path.name)}.*"):
                left.unlink(missing_ok=True)

    def _is_there(self, number: int) -> bool:
        names = self.exporter.names(number)
        return bool(names) and all(_exists(self.out / name) for name in names)

    def _part(self, number: int) -> Part:
        """Part `number` as it was decided, read again from the run."""
        decided = self.ledger.read(number).groups
        groups = (GroupSlice(g, tuple(self.reader.get(r) for r in rollouts)) for g, rollouts in decided)
        return Part(number, self.reader.run_id, tuple(groups))

    def _wait_for_trainer(self) -> None:
        while self.bridge is not None and not self.stop():
            if self.bridge.may_go_on(self.counts.parts):
                return
            self._restore()
            time.sleep(self.poll_s)


def _is_usable(slice_: GroupSlice) -> bool:
    return any(member.summary.usable for member in slice_.members)


def _exists(path: Path) -> bool:
    """Asked by opening it: a stat may be answered from the cache of a mount."""
    try:
        with path.open("rb"):
            return True
    except FileNotFoundError:
        return False
