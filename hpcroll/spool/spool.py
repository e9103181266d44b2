"""The spool of one run: created or opened, submitted to, asked."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from hpcroll.config import RunConfig
from hpcroll.contract import Rollout, RolloutRef, Task
from hpcroll.errors import ConfigError, SpoolError
from hpcroll.fs import RunPaths, list_names, make_directories, probe_filesystem, publish, read_token
from hpcroll.spool.counts import ExactCounts, RunCounts, count_exactly, sum_beats
from hpcroll.spool.manifest import Segment, read_segment
from hpcroll.spool.record import RunRecord, read_run, require_same_config
from hpcroll.spool.submission import Submission, submit
from hpcroll.spool.wishes import Wishes

_SEGMENTS_CACHE_S = 1.0
_SUFFIX = ".jsonl.zst"


class Spool:
    """A run's job queue on the shared file system. Safe to use from several threads."""

    def __init__(
        self, paths: RunPaths, record: RunRecord, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.paths = paths
        self.record = record
        self.wishes = Wishes(paths, clock=clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._by_name: dict[str, Segment] = {}
        self._ordered: tuple[Segment, ...] = ()
        self._listed_at_s: float | None = None

    @classmethod
    def create(cls, root: Path, config: RunConfig) -> Self:
        """The run in directory `root`, created with `config`, or opened where it was created with the same.

        Raises `UnsafeFilesystemError` where the file system cannot hold a run, and `ConfigError` where
        `root` holds a run with another config or cannot be written; no run.json appears then.
        """
        paths = RunPaths(root.resolve())
        try:
            paths.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run directory {root} cannot be created: {error.strerror}; choose one that you may write"
            ) from error
        if not paths.run_json.exists():
            found = probe_filesystem(paths.root)
            make_directories(list(paths.directories()))
            record = RunRecord(
                run_id=secrets.token_hex(8),
                created_at=time.time(),
                config=config,
                config_sha256=config.digest(),
                filesystem=found,
            )
            # Whoever links run.json first made the run; everyone then reads what stands there.
            publish(paths.run_json, record.to_json().encode())
        record = read_run(paths)
        require_same_config(record, config, paths)
        return cls(paths, record)

    @classmethod
    def open(cls, root: Path) -> Self:
        """The run in directory `root`; raises `SpoolError` where there is none."""
        paths = RunPaths(root.resolve())
        return cls(paths, read_run(paths))

    @property
    def config(self) -> RunConfig:
        return self.record.config

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def created_at(self) -> float:
        """Unix seconds on the creator's node."""
        return self.record.created_at

    def submit(self, tasks: Sequence[Task], *, samples: int, key: str) -> Submission:
        """Submits `samples` rollouts of each task; see `submission.submit`."""
        if self.wishes.closed:
            raise SpoolError(f"run {self.paths.root} is closed; submit to another run")
        submission = submit(
            self.paths, self.config.leg_names, tasks, samples=samples, key=key, earlier=self.segments()
        )
        with self._lock:
            self._listed_at_s = None
        return submission

    def segments(self) -> tuple[Segment, ...]:
        """Every submission in the order it was submitted; new ones appear within a second.

        Raises `CorruptRecordError` where a segment file is damaged.
        """
        with self._lock:
            now_s = self._clock()
            if self._listed_at_s is None or now_s - self._listed_at_s >= _SEGMENTS_CACHE_S:
                self._read_new()
                self._listed_at_s = now_s
            return self._ordered

    def segment(self, name: str) -> Segment:
        """The submission named `name`; raises `SpoolError` where there is none."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        # By its name, not from a listing, which may be older than the segment.
        found = read_segment(self.paths.segment_file(name))
        if found is None:
            raise SpoolError(f"run {self.paths.root} has no submission {name}")
        return found

    def rollout(self, ref: RolloutRef) -> Rollout:
        """The rollout named `ref`; raises `SpoolError` where there is none."""
        segment = self.segment(ref.segment)
        if ref.ordinal >= segment.size:
            raise SpoolError(f"rollout {ref}: submission {segment.key!r} has only {segment.size} rollouts")
        return segment.rollout(ref.ordinal)

    def done_token(self, ref: RolloutRef, leg: str | None = None) -> str | None:
        """The incarnation whose result rollout `ref` has in `leg` (default: the last); None: not done."""
        return read_token(self.paths.done_link(leg or self.config.leg_names[-1], ref))

    def is_done(self, ref: RolloutRef, leg: str | None = None) -> bool:
        """Whether rollout `ref` is done in `leg` (default: the last)."""
        return self.done_token(ref, leg) is not None

    def is_cancelled(self, ref: RolloutRef) -> bool:
        """Nobody wants this rollout any more."""
        return self.wishes.cancels(ref, self.segment(ref.segment).samples)

    def counts(self) -> RunCounts:
        """Where the run stands, from the heartbeats: never a stat or a listing per rollout."""
        return sum_beats(self.paths, self.segments())

    def exact_counts(self) -> ExactCounts:
        """Where the run stands, from every name: a listing per 4,096 rollouts and leg."""
        return count_exactly(self.paths, self.config.leg_names, self.segments())

    def _read_new(self) -> None:
        files = [name for name in list_names(self.paths.tasks) if name.endswith(_SUFFIX)]
        for name in {file.removesuffix(_SUFFIX) for file in files} - self._by_name.keys():
            segment = read_segment(self.paths.segment_file(name))
            if segment is not None:
                self._by_name[name] = segment
        # Two submitters' clocks may differ: then the order does, and nothing else.
        by_time = sorted(self._by_name.values(), key=lambda found: (found.submitted_at, found.name))
        self._ordered = tuple(by_time)
