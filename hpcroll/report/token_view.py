"""Tokens for people, span by span: who said them, whether they are trained on, how likely they were."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
from rich.text import Text

from hpcroll.contract import Segment, SegmentTokens, Trajectory
from hpcroll.errors import ConfigError
from hpcroll.report.turns import clean, policy_name

Decoder = Callable[[Sequence[int]], list[str]]
"""The text of each of some ids; ids that share a character give it with the last."""

_LONGEST_CONTEXT = 48
"""Context tokens of a span that are shown; the middle of longer ones is left out."""
_SHADES = ((0.5, "green"), (0.1, "yellow"), (0.01, "dark_orange"), (0.0, "bold red"))
"""Least probability of a sampled token, and its colour."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of a segment that have everything but their id and probability in common."""

    start: int
    stop: int
    sampled: bool
    trained: bool
    said_by: str
    """The context's role, or the policy."""
    call_index: int | None


def stretches(trajectory: Trajectory, segment: Segment) -> Iterator[Stretch]:
    """The stretches of a segment, in order; they cover it."""
    arrays = trajectory.tokens[segment.segment_index]
    calls = sorted(
        (span.start, span.call_index)
        for span in trajectory.record.call_spans
        if span.segment_index == segment.segment_index
    )
    pieces = [(run.start, run.start + run.length, True, policy_name(run)) for run in segment.policy_runs] + [
        (span.start, span.start + span.length, False, span.role.value) for span in segment.context_spans
    ]
    for start, stop, sampled, said_by in sorted(pieces):
        mask = arrays.loss_mask[start:stop]
        edges = [start, *(start + 1 + np.flatnonzero(np.diff(mask))).tolist(), stop]
        for begin, end in pairwise(edges):
            index = calls[bisect_right(calls, begin, key=itemgetter(0)) - 1][1] if sampled else None
            yield Stretch(begin, end, sampled, bool(arrays.loss_mask[begin]), said_by, index)


def token_view(
    trajectory: Trajectory,
    *,
    segment: int | None = None,
    call: int | None = None,
    decode: Decoder | None = None,
) -> Iterator[Text]:
    """Every segment, one segment, or the samples of one call: a line on each stretch, then its tokens.

    Ids, or texts with `decode`. Colours say how likely a sampled token was; what is not trained on is
    struck through, context is dim. The lines say the same without colours.
    """
    yield _legend()
    for one in trajectory.record.segments:
        own = [item for item in stretches(trajectory, one) if call in (None, item.call_index)]
        if segment not in (None, one.segment_index) or not own:
            continue
        yield Text(f"segment {one.segment_index} ({one.role}, {one.began})", style="bold")
        arrays = trajectory.tokens[one.segment_index]
        policy = ""
        for item in own:
            changed = item.sampled and policy not in ("", item.said_by)
            if changed:
                yield Text(f"  policy changes: {policy} -> {item.said_by}", style="bold magenta")
            policy = item.said_by if item.sampled else policy
            yield _heading(item, arrays)
            yield _tokens(item, arrays, decode)


def _legend() -> Text:
    legend = Text().append("probability of a sampled token: ", style="dim")
    for least, style in _SHADES:
        legend.append(f">={least:g} " if least else "below ", style=style)
    return legend.append(" not trained on ", style="strike").append(" context", style="dim")


def _heading(item: Stretch, arrays: SegmentTokens) -> Text:
    size = item.stop - item.start
    line = Text(f"  [{item.start}, {item.stop}) ")
    if not item.sampled:
        return line.append(f"context, {size} tokens, {item.said_by}", style="dim")
    logprobs = arrays.logprobs[item.start : item.stop]
    likely = f"log-probability mean {float(logprobs.mean()):.3f}, least {float(logprobs.min()):.3f}"
    trained = "trained" if item.trained else "not trained"
    who = f", call {item.call_index}" if item.call_index is not None else ""
    return line.append(f"sampled, {size} tokens, {trained}{who}, {item.said_by}, {likely}", style="bold")


def _tokens(item: Stretch, arrays: SegmentTokens, decode: Decoder | None) -> Text:
    ids = arrays.ids[item.start : item.stop].tolist()
    shown = decode(ids) if decode is not None else [f"{token} " for token in ids]
    line = Text("    ")
    if not item.sampled:
        if len(shown) > _LONGEST_CONTEXT:
            half = _LONGEST_CONTEXT // 2
            left_out = f"... {len(shown) - 2 * half} tokens left out ... "
            shown = [*shown[:half], left_out, *shown[-half:]]
        return line.append(_indented("".join(shown)), style="dim")
    for text, logprob in zip(shown, arrays.logprobs[item.start : item.stop].tolist(), strict=True):
        style = next(style for least, style in _SHADES if math.exp(logprob) >= least)
        line.append(_indented(text), style=style if item.trained else f"{style} strike")
    return line


def _indented(text: str) -> str:
    return clean(text).replace("\n", "\n    ")


def token_lines(segment: Segment, arrays: SegmentTokens) -> Iterator[str]:
    """One line per token: position, id, who, loss mask, log-probability, policy versions."""
    versions = {}
    for run in segment.policy_runs:
        for position in range(run.start, run.start + run.length):
            versions[position] = f"{run.version_low}..{run.version_high}"
    for position in range(len(arrays)):
        logprob = float(arrays.logprobs[position])
        who = "sampled" if arrays.sampled[position] else "context"
        shown = "-" if math.isnan(logprob) else f"{logprob:.4f}"
        mask, version = int(arrays.loss_mask[position]), versions.get(position, "-")
        yield f"{position:6d} {int(arrays.ids[position]):8d} {who} {mask} {shown} {version}"


def load_decoder(path: Path) -> Decoder:
    """Decodes with the `tokenizer.json` at `path`, a file or a directory that holds it.

    Raises `ConfigError` where there is none, or where the package `tokenizers` is missing.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; --tokenizer takes a model's directory or a tokenizer.json")
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer needs the package tokenizers ({error}); pip install tokenizers"
        ) from error
    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> list[str]:
        # A stream, because a character may be cut between two tokens.
        stream = DecodeStream(skip_special_tokens=False)
        texts = []
        for token in ids:
            known = tokenizer.id_to_token(token) is not None
            texts.append((stream.step(tokenizer, token) or "") if known else f"<{token}>")
        return texts

    return decode
