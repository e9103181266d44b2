"""Single-bit errors: one flipped, looked at, and flipped back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def flipped_bit(path: Path, position: int, bit: int) -> Iterator[None]:
    """`path` with bit `bit` of the byte at `position` flipped."""
    _flip(path, position, bit)
    try:
        yield
    finally:
        _flip(path, position, bit)


def seeded_flips(path: Path, count: int, chance: random.Random, *, least: int = 0) -> Iterator[int]:
    """`count` times a position in `path` from `least` on, whose byte has a random bit flipped meanwhile."""
    size = path.stat().st_size
    for _ in range(count):
        position = chance.randrange(least, size)
        with flipped_bit(path, position, chance.randrange(8)):
            yield position


def _flip(path: Path, position: int, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, position)
        os.pwrite(descriptor, bytes([byte ^ 1 << bit]), position)
    finally:
        os.close(descriptor)
