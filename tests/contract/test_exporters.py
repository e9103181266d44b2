"""Every exporter keeps the contract; each format is read back by what reads such files, not by our code."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import numpy as np
import pyarrow.parquet
import pytest
import safetensors
import safetensors.numpy

from hpcroll.contract import Trajectory
from hpcroll.exporters import Exporter, Fact
from hpcroll.fs import RunPaths
from hpcroll.plugins import Family, known, load
from hpcroll.testing.exporter_suite import ExporterContract, Found
from tests.shard_runs import ShardRun

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "exporters.md"


class _OnDisk(ExporterContract):
    """Commits as a worker does."""

    def commit(self, root: Path, trajectories: Sequence[Trajectory]) -> None:
        run = ShardRun(RunPaths(root), "init+run+eval") if root.exists() else ShardRun.create(root)
        incarnation = f"w{len(list(run.paths.workers.iterdir()))}"
        with run.writer(incarnation) as writer:
            addresses = [writer.append(_of(trajectory, incarnation)) for trajectory in trajectories]
            writer.sync()
            writer.mark([a for a in addresses if run.confirm(a.ref.ordinal, incarnation)])


def _of(trajectory: Trajectory, incarnation: str) -> Trajectory:
    record = trajectory.record.model_copy(update={"incarnation": incarnation})
    return Trajectory(record, trajectory.tokens)


def _parts(out: Path, pattern: str) -> list[Path]:
    return sorted(out.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


def _joined(prompt: Sequence[int], response: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(prompt), np.asarray(response)])


class TestJsonl(_OnDisk):
    name = "jsonl"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.jsonl"):
            for line in path.read_text(encoding="ascii").splitlines():
                yield from _rows_of_record(json.loads(line))


def _rows_of_record(record: dict[str, Any]) -> Iterator[Found]:
    runs = [run for segment in record["segments"] for run in segment["policy_runs"]]
    for segment, arrays in zip(record["segments"], record["tokens"], strict=True):
        if not any(arrays["sampled"]):
            continue
        versions = np.full(segment["length"], -1)
        for run in segment["policy_runs"]:
            versions[run["start"] : run["start"] + run["length"]] = run["version_low"]
        yield Found(
            ids=np.array(arrays["ids"]),
            loss_mask=np.array(arrays["loss_mask"]),
            logprobs=np.array([np.nan if v is None else v for v in arrays["logprobs"]]),
            rollout=record["rollout_id"],
            group=record["group_id"],
            reward=record["reward"],
            weight=segment["weight"],
            versions=versions,
            sampled=np.array(arrays["sampled"]),
            status=record["status"],
            task=record["task_id"],
            lineage=runs[0]["lineage"],
        )


class TestParquet(_OnDisk):
    name = "parquet"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.parquet"):
            for row in pyarrow.parquet.read_table(path).to_pylist():
                if not any(row["sampled"] or ()):
                    continue
                yield Found(
                    ids=np.array(row["ids"]),
                    loss_mask=np.array(row["loss_mask"]),
                    logprobs=np.array([np.nan if v is None else v for v in row["logprobs"]]),
                    rollout=row["rollout_id"],
                    group=row["group_id"],
                    reward=row["reward"],
                    weight=row["weight"],
                    versions=np.array(row["versions"]),
                    sampled=np.array(row["sampled"]),
                    status=row["status"],
                    task=row["task_id"],
                    lineage=row["lineage"],
                )

    def test_the_record_stands_once_with_its_text_as_it_was(self, tmp_path: Path) -> None:
        from hpcroll.testing.exporter_suite import sample_trajectories

        trajectories = sample_trajectories()
        self.commit(tmp_path / "run", trajectories)
        self.export(tmp_path / "run", tmp_path / "out")
        (path,) = _parts(tmp_path / "out", "part-*.parquet")
        records = [
            json.loads(text) for text in pyarrow.parquet.read_table(path)["record"].to_pylist() if text
        ]
        assert [r["rollout_id"] for r in records] == [t.record.rollout_id for t in trajectories]
        assert [r["answer"] for r in records] == [t.record.answer for t in trajectories]


class TestPrimeRl(_OnDisk):
    name = "prime-rl"
    options: ClassVar[Mapping[str, Any]] = {"groups": 2, "world": 2, "seq_len": 4096}

    def read(self, out: Path) -> Iterator[Found]:
        steps = sorted(out.glob("rollouts/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
        assert [int(step.name.removeprefix("step_")) for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            ranks = [msgpack.unpackb((step / f"rank_{rank}.bin").read_bytes()) for rank in range(2)]
            assert len(ranks[0]) == len(ranks[1]) > 0
            for fields in (*ranks[0], *ranks[1]):
                yield from _rows_of_micro_batch(fields)


def _rows_of_micro_batch(fields: list[Any]) -> Iterator[Found]:
    ids, mask, advantages, logprobs, positions, lengths, temperatures, names, seq_lens = fields[:9]
    per_token = (mask, advantages, logprobs, positions, temperatures, names)
    assert all(len(values) == len(ids) for values in per_token)
    assert lengths == seq_lens
    assert sum(lengths) == len(ids) <= 4096
    assert all(np.isfinite(values).all() for values in (advantages, logprobs, temperatures))
    assert min(temperatures) > 0
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        start += length
        assert positions[span] == list(range(length))
        if any(mask[span]):  # the rest are dummies
            yield Found(
                ids=np.array(ids[span]),
                loss_mask=np.array(mask[span]).astype(int),
                logprobs=np.array(logprobs[span]),
                advantage=advantages[start - 1],
            )


def _tensors(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    with safetensors.safe_open(path, framework="numpy") as file:
        rows = json.loads(file.metadata()["rows"])
    tensors = safetensors.numpy.load_file(path)
    assert all(len(tensor) == len(rows) for tensor in tensors.values())
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    return tensors, rows


def _said(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "rollout": row["rollout_id"],
        "group": row["group_id"],
        "weight": row["weight"],
        "status": row["status"],
        "task": row["task_id"],
        "lineage": row["lineage"],
        "advantage": row["advantage"],
    }


class TestAreal(_OnDisk):
    name = "areal"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.safetensors"):
            tensors, rows = _tensors(path)
            kinds = {name: str(tensor.dtype) for name, tensor in tensors.items()}
            assert kinds == {
                "input_ids": "int32",
                "loss_mask": "int32",
                "logprobs": "float32",
                "versions": "int32",
                "attention_mask": "bool",
                "rewards": "float32",
            }
            for index, row in enumerate(rows):
                real = tensors["attention_mask"][index]
                assert real.tolist() == sorted(real.tolist(), reverse=True)
                versions = tensors["versions"][index]
                assert (versions[~real] == -1).all()
                yield Found(
                    ids=tensors["input_ids"][index][real],
                    loss_mask=tensors["loss_mask"][index][real],
                    logprobs=tensors["logprobs"][index][real],
                    versions=versions[real],
                    sampled=(versions[real] >= 0).astype(int),
                    reward=float(tensors["rewards"][index]),
                    **_said(row),
                )


class TestNemoRl(_OnDisk):
    name = "nemo-rl"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.safetensors"):
            tensors, rows = _tensors(path)
            for index, row in enumerate(rows):
                real = slice(0, int(tensors["input_lengths"][index]))
                assert tensors["sample_mask"][index] == 1.0
                assert not tensors["token_mask"][index][real.stop :].any()
                assert (tensors["advantages"][index][real] == np.float32(row["advantage"])).all()
                yield Found(
                    ids=tensors["input_ids"][index][real],
                    loss_mask=tensors["token_mask"][index][real],
                    logprobs=tensors["generation_logprobs"][index][real],
                    reward=float(tensors["total_reward"][index]),
                    **_said(row),
                )


class TestVerl(_OnDisk):
    name = "verl"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.safetensors"):
            tensors, rows = _tensors(path)
            width = tensors["prompts"].shape[1]
            whole = np.concatenate([tensors["prompts"], tensors["responses"]], axis=1)
            np.testing.assert_array_equal(tensors["input_ids"], whole)
            for index, row in enumerate(rows):
                real = tensors["attention_mask"][index] == 1
                assert tensors["position_ids"][index][real].tolist() == list(range(real.sum()))
                blank = np.zeros(width)
                mask, logprobs = tensors["response_mask"][index], tensors["rollout_log_probs"][index]
                (last,) = np.flatnonzero(tensors["rm_scores"][index]) if row["reward"] else (None,)
                assert last in (None, int(real[width:].sum()) - 1)
                yield Found(
                    ids=tensors["input_ids"][index][real],
                    loss_mask=np.concatenate([blank, mask])[real],
                    logprobs=np.concatenate([blank, logprobs])[real],
                    reward=float(tensors["rm_scores"][index].sum()),
                    **_said(row),
                )


class TestSkyRl(_OnDisk):
    name = "skyrl"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.json"):
            output = json.loads(path.read_text(), parse_constant=pytest.fail)
            seen: dict[str, bool] = {}
            for index, response in enumerate(output["response_ids"]):
                prompt = output["prompt_token_ids"][index]
                blank = np.zeros(len(prompt))
                trajectory = output["trajectory_ids"][index]
                name = f"{trajectory['instance_id']}_{trajectory['repetition_id']}"
                assert not seen.get(name), "a row after the last one of its rollout"
                seen[name] = output["is_last_step"][index]
                yield Found(
                    ids=_joined(prompt, response),
                    loss_mask=_joined(blank, output["loss_masks"][index]),
                    logprobs=_joined(blank, output["rollout_logprobs"][index]),
                    rollout=name,
                    group=trajectory["instance_id"],
                    reward=output["rewards"][index],
                    weight=output["weights"][index],
                )
            assert all(seen.values()), "a rollout without a last row"


class TestTrl(_OnDisk):
    name = "trl"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.parquet"):
            for row in pyarrow.parquet.read_table(path).to_pylist():
                yield Found(
                    ids=np.array(row["input_ids"]),
                    loss_mask=np.array(row["completion_mask"]),
                    logprobs=np.array(row["old_log_probs"]),
                    reward=row["metrics"]["reward"],
                    **_said({**row, "group_id": row["group_id"]}),
                )


class _PlainUnpickler(pickle.Unpickler):
    """Refuses everything but plain containers, as `torch.load(weights_only=True)` does."""

    def find_class(self, module: str, name: str) -> Any:
        raise AssertionError(f"the file wants {module}.{name}")


class TestSlime(_OnDisk):
    name = "slime"

    def read(self, out: Path) -> Iterator[Found]:
        for number, path in enumerate(_parts(out, "rollout_*.pt")):
            with zipfile.ZipFile(path) as archive:
                data = _PlainUnpickler(io.BytesIO(archive.read("archive/data.pkl"))).load()
            assert data["rollout_id"] == number
            by_rollout = defaultdict(set)
            for sample in data["samples"]:
                start = len(sample["tokens"]) - sample["response_length"]
                blank = np.zeros(start)
                assert (
                    len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
                )
                by_rollout[sample["rollout_id"]].add(sample["metadata"]["rollout_id"])
                yield Found(
                    ids=np.array(sample["tokens"]),
                    loss_mask=_joined(blank, sample["loss_mask"]),
                    logprobs=_joined(blank, sample["rollout_log_probs"]),
                    reward=sample["reward"],
                    **{**_said(sample["metadata"]), "status": sample["status"]},
                )
            assert all(len(names) == 1 for names in by_rollout.values())


class TestNemoGym(_OnDisk):
    name = "nemo-gym"

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "part-*.jsonl"):
            for text in path.read_text(encoding="ascii").splitlines():
                line = json.loads(text, parse_constant=pytest.fail)
                ids: list[int] = []
                mask: list[int] = []
                logprobs: list[float] = []
                for item in line["response"]["output"]:
                    if "generation_token_ids" not in item:
                        continue
                    prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
                    assert prompt[: len(ids)] == ids, "prompts are not contiguous"
                    fresh = len(prompt) - len(ids)
                    ids = prompt + sampled
                    mask += [0] * fresh + [1] * len(sampled)
                    logprobs += [0.0] * fresh + item["generation_log_probs"]
                yield Found(
                    ids=np.array(ids),
                    loss_mask=np.array(mask),
                    logprobs=np.array(logprobs),
                    reward=line["reward"],
                    **_said(line["hpcroll"]),
                )

    def expected(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, int]]:
        return [(_cut(t), i) for t, i in super().expected(trajectories)]


def _cut(trajectory: Trajectory) -> Trajectory:
    """Without the tokens after the last one that is trained on: no item of NeMo Gym's would hold them."""
    from hpcroll.contract import SegmentTokens

    def cut(arrays: SegmentTokens) -> SegmentTokens:
        trained = np.flatnonzero(arrays.loss_mask)
        end = int(trained[-1]) + 1 if len(trained) else len(arrays)
        return SegmentTokens(
            arrays.ids[:end], arrays.sampled[:end], arrays.loss_mask[:end], arrays.logprobs[:end]
        )

    return Trajectory(trajectory.record, tuple(cut(arrays) for arrays in trajectory.tokens))


class TestAtif(_OnDisk):
    name = "atif"
    options: ClassVar[Mapping[str, Any]] = {"prompt_ids": True}

    def read(self, out: Path) -> Iterator[Found]:
        for path in _parts(out, "*.json"):
            document = json.loads(path.read_text(encoding="ascii"), parse_constant=pytest.fail)
            record = document["extra"]["hpcroll"]
            segments: dict[int, dict[str, Any]] = {
                segment["segment_index"]: {
                    "ids": np.zeros(segment["length"], int),
                    "mask": np.zeros(segment["length"], int),
                    "logprobs": np.zeros(segment["length"]),
                    "versions": np.full(segment["length"], -1),
                    "sampled": np.zeros(segment["length"], int),
                }
                for segment in record["segments"]
            }
            for step in _steps(document):
                span, metrics = step["extra"]["span"], step["metrics"]
                if span is None:
                    continue
                arrays = segments[span["segment_index"]]
                end = span["start"] + span["length"]
                where = slice(span["start"], end)
                arrays["ids"][:end] = metrics["prompt_token_ids"] + metrics["completion_token_ids"]
                arrays["logprobs"][where] = metrics["logprobs"]
                arrays["mask"][where] = metrics["extra"]["loss_mask"]
                arrays["sampled"][where] = 1
            for segment in record["segments"]:
                arrays = segments[segment["segment_index"]]
                for run in segment["policy_runs"]:
                    arrays["versions"][run["start"] : run["start"] + run["length"]] = run["version_low"]
                if not arrays["sampled"].any():
                    continue
                yield Found(
                    ids=arrays["ids"],
                    loss_mask=arrays["mask"],
                    logprobs=arrays["logprobs"],
                    versions=arrays["versions"],
                    sampled=arrays["sampled"],
                    rollout=document["session_id"],
                    group=record["group_id"],
                    reward=record["reward"],
                    weight=segment["weight"],
                    status=record["status"],
                    task=record["task_id"],
                    lineage=record["segments"][0]["policy_runs"][0]["lineage"]
                    if record["segments"][0]["policy_runs"]
                    else None,
                )


def _steps(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for trajectory in (document, *document.get("subagent_trajectories", ())):
        for number, step in enumerate(trajectory["steps"], start=1):
            assert step["step_id"] == number
            if step.get("llm_call_count") == 1:
                yield step


def exporters() -> dict[str, type[Exporter]]:
    return {name: load(Family.EXPORTER, name) for name in known(Family.EXPORTER)}


def test_every_exporter_of_ours_is_under_contract() -> None:
    tested = {kind.name for kind in _OnDisk.__subclasses__()}
    assert tested == set(exporters())


def test_the_table_of_losses_is_what_the_exporters_declare() -> None:
    _, _, after = DOCUMENT.read_text().partition("\n| fact ")
    head, *lines = f"| fact {after}".partition("\n\n")[0].splitlines()
    names = [cell.strip().strip("`") for cell in head.strip("|").split("|")][1:]
    assert names == sorted(exporters())
    rows = {line.split("|")[1].strip().strip("`"): line for line in lines}
    for fact in Fact:
        cells = [cell.strip() for cell in rows[fact.value].strip("|").split("|")][1:]
        said = {name for name, cell in zip(names, cells, strict=True) if cell == "-"}
        assert said == {n for n, kind in exporters().items() if fact in kind.loses}, fact


def test_the_document_names_each_format_and_its_source() -> None:
    text = DOCUMENT.read_text()
    for name, kind in exporters().items():
        assert f"## {name}" in text
        assert kind.source.split(":")[0].split(" (")[0] in text, (name, kind.source)
