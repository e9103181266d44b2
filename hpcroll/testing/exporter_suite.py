"""The contract of exporters as tests: subclass `ExporterContract` and read your format back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from hpcroll.contract import SegmentTokens, Status, Trajectory
from hpcroll.errors import ConfigError
from hpcroll.exporters import Exporter, ExportFilters, Fact, Unit, export_run, make_exporter
from hpcroll.exporters.rows import token_versions
from hpcroll.testing.trajectories import random_trajectory

GROUP_SIZE = 4
_ODD = "half an emoji: \ud83d, and 日付"


@dataclass(frozen=True, slots=True)
class Found:
    """A row as it was read back. A field is None where the format has no place for it.

    Token arrays have length T and entry i is of token i: formats that split prompt and response are put
    together again, with 0 for the prompt.
    """

    ids: NDArray[Any]
    loss_mask: NDArray[Any]
    logprobs: NDArray[Any]
    """Compared where tokens are trained on."""
    rollout: object = None
    """What stands for the rollout: equal for the rows of one, different for others."""
    group: object = None
    reward: float | None = None
    advantage: float | None = None
    weight: float | None = None
    versions: NDArray[Any] | None = None
    sampled: NDArray[Any] | None = None
    status: str | None = None
    task: str | None = None
    lineage: str | None = None


_FIELDS = {
    Fact.ROLLOUT: "rollout",
    Fact.GROUP: "group",
    Fact.REWARD: "reward",
    Fact.WEIGHT: "weight",
    Fact.VERSIONS: "versions",
    Fact.STATUS: "status",
    Fact.TASK: "task",
    Fact.LINEAGE: "lineage",
}
"""Facts that a row must have unless the exporter declares them lost."""


def sample_trajectories() -> list[Trajectory]:
    """Rollouts of six groups: several segments, null rewards, failures, text that no UTF-8 can hold."""
    made = []
    for ordinal in range(6 * GROUP_SIZE):
        fields: dict[str, Any] = {}
        if ordinal == 1:
            fields = {"reward": None, "reward_valid": False, "verdict": None}
        elif ordinal == 6:
            fields = {
                "status": Status.FAILED,
                "trainable": False,
                "not_trainable_because": ("it failed",),
                "reward": None,
                "reward_valid": False,
                "verdict": None,
            }
        elif ordinal == 10:
            fields = {"status": Status.TRUNCATED}
        rollout_id = f"0123456789abcdef/{ordinal}"
        trajectory = random_trajectory(100 + ordinal, rollout_id=rollout_id, group_size=GROUP_SIZE, **fields)
        made.append(_with_odd_text(trajectory) if ordinal == 9 else trajectory)
    assert sum(len(trajectory.tokens) > 1 for trajectory in made) > 3
    return made


def _with_odd_text(trajectory: Trajectory) -> Trajectory:
    said = {"role": "user", "content": _ODD}
    asked = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1e999}'}}
    reply = {"role": "assistant", "content": _ODD, "tool_calls": [asked]}
    calls = [
        call.model_copy(update={"messages": (said,), "reply": reply}) for call in trajectory.record.calls
    ]
    record = trajectory.record.model_copy(update={"calls": tuple(calls), "answer": _ODD, "dataset": "naïve"})
    return Trajectory(record, trajectory.tokens)


class ExporterContract:
    """What users rely on, whatever the format."""

    name: ClassVar[str]
    """The exporter's entry point."""
    options: ClassVar[Mapping[str, Any]] = {}

    def commit(self, root: Path, trajectories: Sequence[Trajectory]) -> None:
        """Commits `trajectories` to the run in `root`, which is created where it does not exist."""
        raise NotImplementedError

    def read(self, out: Path) -> Iterable[Found]:
        """Every row of the export in `out`."""
        raise NotImplementedError

    def export(self, root: Path, out: Path, **arguments: Any) -> list[Found]:
        """Exports and reads back."""
        export_run(root, self.name, out, options=self.options, **arguments)
        return list(self.read(out))

    @property
    def exporter(self) -> Exporter:
        return make_exporter(self.name, self.options)

    def expected(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, int]]:
        """Trajectory and segment of each row that must be there."""
        if self.exporter.unit is Unit.GROUP:
            usable = [t for t in trajectories if t.record.trainable and t.record.reward_valid]
            return [(t, i) for t in usable for i, arrays in enumerate(t.tokens) if arrays.loss_mask.any()]
        return [(t, i) for t in trajectories for i in range(len(t.tokens)) if t.tokens[i].sampled.any()]

    def test_every_row_is_there_once_bit_for_bit(self, tmp_path: Path) -> None:
        trajectories = sample_trajectories()
        self.commit(tmp_path / "run", trajectories)
        found = self.export(tmp_path / "run", tmp_path / "out")
        wanted = {_key(t.tokens[i]): (t, i) for t, i in self.expected(trajectories)}
        keys = [_found_key(row) for row in found]
        assert sorted(keys) == sorted(wanted), (len(keys), len(wanted))
        for key, row in zip(keys, found, strict=True):
            self._compare(row, *wanted[key])

    def test_what_is_not_declared_lost_can_be_read_back(self, tmp_path: Path) -> None:
        trajectories = sample_trajectories()
        self.commit(tmp_path / "run", trajectories)
        found = self.export(tmp_path / "run", tmp_path / "out")
        wanted = {_key(t.tokens[i]): (t, i) for t, i in self.expected(trajectories)}
        for fact, field in _FIELDS.items():
            values = [getattr(row, field) for row in found]
            if fact in self.exporter.loses:
                assert all(value is None for value in values), f"{fact} is declared lost and is there"
                continue
            by_row = zip(found, values, strict=True)
            missing = [v is None and _fact(fact, *wanted[_found_key(row)]) is not None for row, v in by_row]
            assert not any(missing), f"{fact} is neither declared lost nor there"

    def test_parts_of_few_tokens_hold_the_same_rows(self, tmp_path: Path) -> None:
        trajectories = sample_trajectories()
        self.commit(tmp_path / "run", trajectories)
        whole = self.export(tmp_path / "run", tmp_path / "whole")
        pieces = self.export(tmp_path / "run", tmp_path / "pieces", part_tokens=1)
        assert sorted(map(_found_key, pieces)) == sorted(map(_found_key, whole))

    def test_an_export_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        self.commit(tmp_path / "run", sample_trajectories())
        for out in ("one", "two"):
            self.export(tmp_path / "run", tmp_path / out)
        assert _files(tmp_path / "one") == _files(tmp_path / "two")
        before = _files(tmp_path / "one")
        self.export(tmp_path / "run", tmp_path / "one")
        assert _files(tmp_path / "one") == before

    def test_a_later_call_adds_what_was_committed_since(self, tmp_path: Path) -> None:
        trajectories = sample_trajectories()
        first, rest = trajectories[: 2 * GROUP_SIZE], trajectories[2 * GROUP_SIZE :]
        self.commit(tmp_path / "run", first)
        some = self.export(tmp_path / "run", tmp_path / "out")
        before = _files(tmp_path / "out")
        self.commit(tmp_path / "run", rest)
        everything = self.export(tmp_path / "run", tmp_path / "out")
        wanted = [_key(t.tokens[i]) for t, i in self.expected(trajectories)]
        assert sorted(map(_found_key, everything)) == sorted(wanted)
        assert len(some) < len(everything)
        after = _files(tmp_path / "out")
        assert {name: after[name] for name in before} == before, "a file that was there has changed"

    def test_a_file_that_was_decided_and_not_written_is_written(self, tmp_path: Path) -> None:
        """What a kill between the decision and the last file leaves."""
        self.commit(tmp_path / "run", sample_trajectories())
        counts = export_run(tmp_path / "run", self.name, tmp_path / "out", options=self.options)
        before = _files(tmp_path / "out")
        newest = self.exporter.names(counts.parts - 1) or before
        for name in newest:
            (tmp_path / "out" / name).unlink()
        self.export(tmp_path / "run", tmp_path / "out")
        assert _files(tmp_path / "out") == before

    def test_an_empty_run_gives_no_file_and_no_error(self, tmp_path: Path) -> None:
        self.commit(tmp_path / "run", [])
        assert self.export(tmp_path / "run", tmp_path / "out") == []
        assert _files(tmp_path / "out") == {}

    def test_rollouts_without_a_reward_alone_do_no_harm(self, tmp_path: Path) -> None:
        unrewarded = [
            random_trajectory(
                ordinal,
                rollout_id=f"0123456789abcdef/{ordinal}",
                group_size=GROUP_SIZE,
                reward=None,
                reward_valid=False,
                verdict=None,
            )
            for ordinal in range(GROUP_SIZE)
        ]
        self.commit(tmp_path / "run", unrewarded)
        found = self.export(tmp_path / "run", tmp_path / "out")
        assert len(found) == len(self.expected(unrewarded))
        assert all(row.reward is None for row in found)

    def test_only_trainable_ones_on_request(self, tmp_path: Path) -> None:
        trajectories = sample_trajectories()
        self.commit(tmp_path / "run", trajectories)
        filters = ExportFilters(trainable=True)
        found = self.export(tmp_path / "run", tmp_path / "out", filters=filters)
        wanted = self.expected([t for t in trajectories if t.record.trainable])
        assert sorted(map(_found_key, found)) == sorted(_key(t.tokens[i]) for t, i in wanted)

    def test_another_export_does_not_go_into_the_same_directory(self, tmp_path: Path) -> None:
        self.commit(tmp_path / "run", sample_trajectories())
        self.export(tmp_path / "run", tmp_path / "out")
        with pytest.raises(ConfigError, match="choose another --out"):
            self.export(tmp_path / "run", tmp_path / "out", filters=ExportFilters(trainable=True))

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            make_exporter(self.name, {"no_such_option": 1})

    def test_it_says_what_is_lost_and_where_the_format_is_defined(self) -> None:
        exporter = type(self.exporter)
        assert len(set(exporter.loses)) == len(exporter.loses)
        assert len(exporter.source) > 10

    def _compare(self, row: Found, trajectory: Trajectory, index: int) -> None:
        record, arrays = trajectory.record, trajectory.tokens[index]
        trained = arrays.loss_mask != 0
        np.testing.assert_array_equal(row.ids, arrays.ids)
        np.testing.assert_array_equal(row.loss_mask, arrays.loss_mask)
        mine, theirs = np.asarray(row.logprobs, np.float32), arrays.logprobs
        assert mine[trained].tobytes() == theirs[trained].tobytes()
        if row.advantage is not None:
            assert np.isfinite(row.advantage)
        if row.reward is not None:
            assert np.float32(row.reward) == np.float32(record.reward)
        if row.weight is not None:
            assert row.weight == pytest.approx(record.segments[index].weight)
        if row.versions is not None:
            np.testing.assert_array_equal(row.versions, token_versions(record.segments[index]))
        if row.sampled is not None:
            np.testing.assert_array_equal(row.sampled, arrays.sampled)
        for fact in (Fact.STATUS, Fact.TASK, Fact.LINEAGE):
            value = getattr(row, _FIELDS[fact])
            assert value in (None, _fact(fact, trajectory, index))


def _fact(fact: Fact, trajectory: Trajectory, index: int) -> object:
    """What a row of this segment says of `fact`; None where the record itself says nothing."""
    record = trajectory.record
    runs = [run for segment in record.segments for run in segment.policy_runs]
    values: dict[Fact, object] = {
        Fact.REWARD: record.reward,
        Fact.STATUS: record.status.value,
        Fact.TASK: record.task_id,
        Fact.LINEAGE: runs[0].lineage if runs else "",
    }
    return values.get(fact, index)


def _key(arrays: SegmentTokens) -> str:
    return json.dumps([arrays.ids.tolist(), arrays.loss_mask.tolist()])


def _found_key(row: Found) -> str:
    ids, mask = np.asarray(row.ids).astype(int), np.asarray(row.loss_mask).astype(int)
    return json.dumps([ids.tolist(), mask.tolist()])


def _files(out: Path) -> dict[str, bytes]:
    """Every file of the export by name, without the exporter's own bookkeeping."""
    paths = (path for path in out.rglob("*") if path.is_file())
    named = {str(path.relative_to(out)): path for path in paths}
    return {name: path.read_bytes() for name, path in named.items() if not name.startswith(".")}
