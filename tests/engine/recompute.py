"""Recomputes what the shards of a run claim: each sampled token's log-probability, by another program.

    python recompute.py RUN --weights 0=CHECKPOINT --weights 1=CHECKPOINT [--tolerance 1e-4] [--axis-offset K]

Reads the shards as docs/reference/shard-format.md describes them, without any code of the project, and runs
every segment through transformers in float32 under the weights of the version that its tokens are recorded
with. Where a record names a range of versions, versions of the range must fit its tokens, and never go back.

It also asks whether the trained tokens were drawn from the distribution whose log-probabilities are
recorded: `surprise_z` is the sum of (-log p - entropy) over them, in standard deviations. Draws at another
temperature or from a truncated distribution are far off, although each log-probability is right.

`--axis-offset K` compares the log-probability of token i with the recorded one of token i + K: a proof that
an axis which is off by K would be noticed.

Prints one JSON object. Exits 0 where every token agrees within the tolerance, 1 where one does not, 2 where
there is nothing to compare. Runs in the engine's environment (tests/setup/install-engine).
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM

HEADER = struct.Struct("<8sHHI8sIIQ")
FRAME = struct.Struct("<IIQQQ")
TOKENS, LOGPROBS, RECORD = 2, 3, 4
BLOCK = 4096
"""Positions whose logits are held at once."""


@dataclass
class Segment:
    """One segment of a record: its arrays, and what the record says of them."""

    where: str
    facts: dict[str, Any]
    calls: list[tuple[int, int, dict[str, Any]]]
    """(start, end, call) of each call whose samples stand here."""
    ids: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray
    loss_mask: np.ndarray


@dataclass
class Run:
    """Tokens of one call under one policy run."""

    start: int
    end: int
    versions: range
    call: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--weights", action="append", required=True, metavar="VERSION=CHECKPOINT")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--axis-offset", type=int, default=0)
    arguments = parser.parse_args()
    models = {}
    for item in arguments.weights:
        version, _, checkpoint = item.partition("=")
        models[int(version)] = load(checkpoint)
    totals = Totals()
    for segment in segments(arguments.run):
        passes = Passes(segment, models)
        for run in runs(segment):
            totals.add(passes, run, arguments.axis_offset)
    report = totals.report(arguments.tolerance)
    print(json.dumps(report))
    if not report["tokens"]:
        return 2
    return 0 if report["disagreeing"] == 0 else 1


class Totals:
    """What was found over all runs of tokens."""

    def __init__(self) -> None:
        self._errors: list[np.ndarray] = []
        self._versions: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._by_call: dict[tuple[str, int], set[int]] = {}
        self._vague = 0
        self._trained = 0
        self._surprise = 0.0
        self._variance = 0.0
        self._worst: dict[str, Any] = {}

    def add(self, passes: Passes, run: Run, axis_offset: int) -> None:
        segment = passes.segment
        claimed = segment.logprobs[run.start + axis_offset : run.end]
        kept = len(claimed)
        if not kept:
            return
        answers = [passes.answer(version, run) for version in run.versions]
        errors = np.stack([np.abs(answer.logprobs[:kept] - claimed) for answer in answers])
        errors[~np.isfinite(errors)] = np.inf
        choice = never_back(errors)
        tokens = np.arange(kept)
        error = errors[choice, tokens]
        self._errors.append(error)
        for index, version in enumerate(run.versions):
            self._versions[str(version)] += int((choice == index).sum())
        versions = self._by_call.setdefault((segment.where, run.call["call_index"]), set())
        versions.update(run.versions[index] for index in set(choice.tolist()))
        self._vague += kept if len(run.versions) > 1 else 0
        self._kinds[run.call["logprob_kind"]] += kept
        trained = segment.loss_mask[run.start : run.start + kept].astype(bool)
        self._trained += int(trained.sum())
        surprise = np.stack([-answer.logprobs - answer.entropies for answer in answers])[choice, tokens]
        variance = np.stack([answer.variances for answer in answers])[choice, tokens]
        self._surprise += float(surprise[trained].sum())
        self._variance += float(variance[trained].sum())
        if error.max() > self._worst.get("error", -1.0):
            at = run.start + int(error.argmax())
            self._worst = {"error": float(error.max()), "where": segment.where, "token": at}

    def report(self, tolerance: float) -> dict[str, Any]:
        every = np.concatenate([np.zeros(0), *self._errors])
        if not len(every):
            return {"tokens": 0}
        return {
            "tokens": len(every),
            "tokens_by_version": {version: count for version, count in self._versions.items() if count},
            "tokens_by_kind": dict(self._kinds),
            "vague_tokens": self._vague,
            "calls_of_two_versions": sum(len(versions) > 1 for versions in self._by_call.values()),
            "trained_tokens": self._trained,
            "max_error": float(every.max()),
            "p999_error": float(np.quantile(every, 0.999)),
            "median_error": float(np.median(every)),
            "disagreeing": int((every > tolerance).sum()),
            "surprise_z": self._surprise / self._variance**0.5 if self._variance else 0.0,
            "worst": self._worst,
        }


def never_back(errors: np.ndarray) -> np.ndarray:
    """Of versions x tokens, the row of each token: rows never fall, and the largest error is the least."""
    reached = np.empty_like(errors)
    came_from = np.zeros(errors.shape, dtype=np.int64)
    best = np.zeros(len(errors))
    for token in range(errors.shape[1]):
        for row in range(len(errors)):
            came_from[row, token] = int(best[: row + 1].argmin())
        best = np.maximum(best[came_from[:, token]], errors[:, token])
        reached[:, token] = best
    choice = np.zeros(errors.shape[1], dtype=np.int64)
    row = int(reached[:, -1].argmin())
    for token in range(errors.shape[1] - 1, -1, -1):
        choice[token] = row
        row = came_from[row, token]
    return choice


def load(checkpoint: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


@dataclass
class Answer:
    """What a model says of tokens [start, end), and of the distribution that each was drawn from."""

    logprobs: np.ndarray
    entropies: np.ndarray
    variances: np.ndarray
    """Of -log p under that distribution."""


class Passes:
    """One full forward pass over a segment per version that is asked for."""

    def __init__(self, segment: Segment, models: dict[int, Any]) -> None:
        self.segment = segment
        self._models = models
        self._states: dict[int, torch.Tensor] = {}

    def answer(self, version: int, run: Run) -> Answer:
        """Each token's log-probability in all that stands before it in the segment."""
        if version not in self._models:
            raise SystemExit(f"{self.segment.where}: no --weights were given for its version {version}")
        model = self._models[version]
        ids = torch.from_numpy(self.segment.ids.astype(np.int64))
        parts = []
        with torch.inference_mode():
            if version not in self._states:
                self._states[version] = model.model(ids[None], use_cache=False).last_hidden_state[0]
            for start in range(run.start, run.end, BLOCK):
                end = min(start + BLOCK, run.end)
                # What the model says after token i - 1 is of token i.
                logits = shaped(model.lm_head(self._states[version][start - 1 : end - 1]), run.call)
                every = torch.log_softmax(logits, dim=-1)
                weighted = every.exp() * every.clamp(min=-1e9)
                entropy = -weighted.sum(dim=-1)
                variance = (weighted * every.clamp(min=-1e9)).sum(dim=-1) - entropy**2
                parts.append((every.gather(1, ids[start:end, None])[:, 0], entropy, variance))
        return Answer(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))


def shaped(logits: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    """The logits of the distribution that the call's log-probabilities are said to be of."""
    if call["logprob_kind"] == "raw":
        return logits
    if call["logprob_kind"] != "sampling":
        raise SystemExit(f"call {call['call_index']} has log-probabilities of kind {call['logprob_kind']!r}")
    sampling = call["sampling_effective"]
    if sampling.get("presence_penalty") or sampling.get("frequency_penalty") or sampling.get("min_p"):
        raise SystemExit("penalties and min_p are not recomputed here")
    if (temperature := sampling.get("temperature")) is not None:
        logits = logits / temperature
    if (top_k := sampling.get("top_k") or -1) > 0:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if (top_p := sampling.get("top_p") or 1.0) < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits


def runs(segment: Segment) -> Iterator[Run]:
    """The sampled tokens of a segment, cut where the policy or the call changes; each token once."""
    covered = np.zeros(len(segment.ids), dtype=bool)
    for policy in segment.facts["policy_runs"]:
        policy_end = policy["start"] + policy["length"]
        for start, end, call in segment.calls:
            first, last = max(start, policy["start"]), min(end, policy_end)
            if first < last:
                covered[first:last] = True
                yield Run(first, last, range(policy["version_low"], policy["version_high"] + 1), call)
    if not np.array_equal(covered, segment.sampled.astype(bool)):
        raise SystemExit(f"{segment.where}: its sampled tokens are not those of its calls and policies")


def segments(run: Path) -> Iterator[Segment]:
    """Every segment of every record in the run's shards."""
    for path in sorted((run / "shards").glob("*.shard")):
        for frames in records(path.read_bytes()):
            record = json.loads(frames[RECORD])
            lengths = [facts["length"] for facts in record["segments"]]
            ids, sampled, loss_mask = tokens(frames[TOKENS], sum(lengths))
            logprobs = floats(frames[LOGPROBS], sampled)
            calls = {call["call_index"]: call for call in record["calls"]}
            begin = 0
            for index, length in enumerate(lengths):
                part = slice(begin, begin + length)
                begin += length
                spans = [
                    (span["start"], span["start"] + span["length"], calls[span["call_index"]])
                    for span in record["call_spans"]
                    if span["segment_index"] == index
                ]
                where = f"rollout {record['rollout_id']} segment {index}"
                facts = record["segments"][index]
                yield Segment(where, facts, spans, ids[part], logprobs[part], sampled[part], loss_mask[part])


def tokens(raw: bytes, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, sampled and loss mask."""
    width = (len(raw) - 4 * total) // total
    low = np.frombuffer(raw, "<u2", total).astype(np.uint32)
    high = np.frombuffer(raw, f"<u{width}", total, 2 * total).astype(np.uint32)
    masks = np.frombuffer(raw, np.uint8, 2 * total, (2 + width) * total)
    return high << 16 | low, masks[:total], masks[total:]


def floats(raw: bytes, sampled: np.ndarray) -> np.ndarray:
    """The log-probabilities, NaN where nothing was sampled."""
    (count,) = struct.unpack_from("<I", raw)
    mantissas = len(raw) - 3 * count
    exponents = zstandard.ZstdDecompressor().decompress(raw[4:mantissas], max_output_size=count)
    rotated = np.frombuffer(exponents, np.uint8).astype(np.uint32) << 24
    rotated |= np.frombuffer(raw, np.uint8, count, mantissas + 2 * count).astype(np.uint32) << 16
    rotated |= np.frombuffer(raw, "<u2", count, mantissas)
    values = (rotated >> 1 | rotated << 31).view(np.float32)
    if count == len(sampled):
        return values
    whole = np.full(len(sampled), np.nan, np.float32)
    whole[sampled == 1] = values
    return whole


def records(data: bytes) -> Iterator[dict[int, bytes]]:
    """The frames of each record of a shard, by kind."""
    offset = 0
    while offset < len(data):
        magic, _, count, _, _, _, _, body = HEADER.unpack_from(data, offset)
        if magic[:7] != b"hpcroll":
            raise SystemExit(f"no record at byte {offset}")
        table = offset + HEADER.size
        at = table + count * FRAME.size + 8
        end = at + body
        frames = {}
        for index in range(count):
            kind, dictionary, stored, raw, _ = FRAME.unpack_from(data, table + index * FRAME.size)
            if dictionary:
                raise SystemExit(
                    f"frame {kind} at byte {at} needs a dictionary, which is not looked for here"
                )
            frame = data[at : at + stored]
            if stored != raw:
                frame = zstandard.ZstdDecompressor().decompress(frame, max_output_size=raw)
            frames[kind] = frame
            at += stored
        yield frames
        offset = end


if __name__ == "__main__":
    sys.exit(main())
