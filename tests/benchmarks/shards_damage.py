"""What becomes of a stored set when a bit flips in it, or when its end is cut off."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLIPS = 24
CUTS = 8
SEED = 1
_LONGEST_S = 120
"""For the undamaged data; damaged ones are given up after ten times what those took."""


@dataclass(frozen=True)
class Found:
    """What a reader gave of damaged data: the rows as they were, others, and whether it said anything."""

    right: int
    wrong: int
    said: bool


def damage(form: Any, folder: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Seeded trials, each on a copy and in a process of its own.

    A flip is noticed where the reader raises, counts damage or dies; silent where a row is missing or other
    than it was and nothing is said; harmless where every row is right and nothing is said. `left`: share of
    the rows still readable after a cut at a random byte, whose mean place in the data is `kept`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        shutil.copytree(folder, whole)
        # In a fork too: a library that has run threads here would not survive the later ones.
        getattr(form, "load", lambda: None)()
        began_s = time.monotonic()
        answer = _in_a_fork(form, whole, keys, _LONGEST_S)
        patience_s = 2 + 10 * (time.monotonic() - began_s)
        if answer is None or len(answer[0]) != len(keys) or answer[1]:
            raise SystemExit(f"{form.name}: the set cannot be read undamaged")
        truth = Counter(answer[0])
        rng, counts = random.Random(f"flips {SEED}"), Counter[str]()
        for _ in range(FLIPS):
            place = _place(folder, rng.random())
            counts[
                _fate(_trial(form, folder, keys, truth, place, rng.randrange(8), patience_s), len(keys))
            ] += 1
        rng, left, kept = random.Random(f"cuts {SEED}"), [], []
        for _ in range(CUTS):
            share = rng.uniform(0.05, 0.95)
            found = _trial(form, folder, keys, truth, _place(folder, share), None, patience_s)
            left.append(found.right / len(keys))
            kept.append(share)
    return {
        "flips": FLIPS,
        **{fate: counts[fate] for fate in ("noticed", "silent", "harmless")},
        "left": sum(left) / len(left),
        "kept": sum(kept) / len(kept),
    }


def _fate(found: Found, rows: int) -> str:
    if found.said:
        return "noticed"
    return "harmless" if (found.right, found.wrong) == (rows, 0) else "silent"


def _data_files(folder: Path) -> list[Path]:
    """Those whose bytes are stored data, in order; of a run its shards and packs alone."""
    run = folder / "run"
    parts = [run / "shards", run / "packs"] if run.exists() else [folder]
    return sorted(path for part in parts for path in part.rglob("*") if path.is_file())


def _place(folder: Path, share: float) -> tuple[Path, int]:
    """The file and offset of the byte at `share` of all data."""
    files = _data_files(folder)
    wanted = int(share * sum(path.stat().st_size for path in files))
    for path in files:
        size = path.stat().st_size
        if wanted < size:
            return path, wanted
        wanted -= size
    return files[-1], files[-1].stat().st_size - 1


def _trial(
    form: Any,
    folder: Path,
    keys: Sequence[str],
    truth: Counter[str],
    place: tuple[Path, int],
    bit: int | None,
    patience_s: float,
) -> Found:
    """Flips a bit of a copy, or cuts it off there (`bit` None), and reads it in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "data"
        shutil.copytree(folder, copy)
        path, offset = copy / place[0].relative_to(folder), place[1]
        if bit is None:
            os.truncate(path, offset)
        else:
            with path.open("r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 1 << bit]))
        answer = _in_a_fork(form, copy, keys, patience_s)
    if answer is None:
        return Found(0, 0, said=True)
    digests, said = answer
    found = Counter(digests)
    right = (found & truth).total()
    return Found(right, found.total() - right, said)


def _digests(form: Any, folder: Path, keys: Sequence[str]) -> tuple[list[str], bool]:
    """Digests of all rows that can be read, in order or else one by one, and whether anything was said."""
    said, digests = False, list[str]()
    try:
        reader = form.open(folder, keys)
    except Exception:  # noqa: BLE001 - any refusal will do
        return [], True
    try:
        for row in reader.rows(record=True):
            digests.append(row.digest())
    except Exception:  # noqa: BLE001
        said, digests = True, []
        for index in range(len(keys)):
            try:
                digests.append(reader.one(index).digest())
            except Exception:  # noqa: BLE001
                continue
    return digests, said or bool(getattr(reader, "noticed", 0))


def _in_a_fork(
    form: Any, folder: Path, keys: Sequence[str], patience_s: float
) -> tuple[list[str], bool] | None:
    """The same in a forked process; None where it died, or hung for `patience_s`."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.close(readable)
        status = 1
        try:
            _silence()
            with os.fdopen(writable, "w") as answer:
                json.dump(_digests(form, folder, keys), answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    parts = []
    with os.fdopen(readable, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], patience_s)[0]:
            part = pipe.read(1 << 16)
            if not part:
                break
            parts.append(part)
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status:
        return None
    digests, said = json.loads(b"".join(parts))
    return digests, said


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
