"""Names that exactly one process gets: hard links, settled by reading the name back.

`link(2)` does not replace, and on every shared file system that we measured exactly one of many contenders
got the name. The answers are another matter: through a caching network mount a contested link answered
EPERM in 281 of 300 cases, a retransmitted request answers EEXIST to its own success, and a soft mount can
apply an operation that it reported as failed. So any answer but success is settled by reading the name.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

from hpcroll.errors import CorruptRecordError

MEANT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMLINK})
"""The only answers that mean what they say; every other one is settled by reading back."""

_SETTLE_PAUSES_S = (0.0, 0.01, 0.05, 0.25)
"""Pauses before the name is tried again when the link failed and yet nobody has the name."""


class Settled(Enum):
    """Who has a name."""

    MINE = auto()
    THEIRS = auto()


def claim_name(token_file: Path, name: Path, *, link: Callable[[Path, Path], None] = os.link) -> bool:
    """Links `name` to `token_file`; True where the name is ours, False where another token has it.

    Safe to call again. Raises `OSError` with ENOSPC, EDQUOT or EMLINK where the server said so, and with
    the last errno where the link failed and yet nobody has the name: it may still appear, so that a caller
    must look again before it believes that it has not got it.
    """

    def is_mine(found: bytes) -> bool:
        return _token(found, name) == _token(token_file.read_bytes(), token_file)

    return settle_link(token_file, name, is_mine=is_mine, link=link) is Settled.MINE


def read_token(name: Path) -> str | None:
    """The incarnation whose token file `name` links to; None where there is no such name.

    Raises `CorruptRecordError` where the name holds something else.
    """
    try:
        found = name.read_bytes()
    except FileNotFoundError:
        return None
    return _token(found, name)


def settle_link(
    source: Path,
    name: Path,
    *,
    is_mine: Callable[[bytes], bool],
    link: Callable[[Path, Path], None] = os.link,
) -> Settled:
    """Links `name` to `source` without replacing and says who has the name; see `claim_name`."""
    failure: OSError | None = None
    for pause_s in _SETTLE_PAUSES_S:
        if pause_s:  # even a sleep of no time gives the CPU away
            time.sleep(pause_s)
        try:
            link(source, name)
            return Settled.MINE
        except OSError as error:
            if error.errno in MEANT_ERRNOS:
                raise
            failure = error
        try:
            return Settled.MINE if is_mine(name.read_bytes()) else Settled.THEIRS
        except FileNotFoundError:
            continue
    assert failure is not None
    raise failure


def _token(content: bytes, path: Path) -> str:
    try:
        incarnation = json.loads(content)["incarnation"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecordError(
            f"{path} is not a worker's token ({len(content)} bytes); the run directory was written to by "
            "something else, or its file system lost data: check it with `hpcroll doctor`"
        ) from error
    if not isinstance(incarnation, str):
        raise CorruptRecordError(f"{path} names no incarnation")
    return incarnation
