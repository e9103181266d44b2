"""Bundles: what a leg hands over arrives whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.errors import CorruptRecordError
from hpcroll.shards import encode_trajectory
from hpcroll.testing.trajectories import random_trajectory
from hpcroll.worker.bundle import Bundle, read_bundle, write_bundle

ARTEFACTS = {"answer": b"42", "patch": bytes(range(256)) * 40, "empty": b""}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundle", Bundle(random_trajectory(3), ARTEFACTS))
    return tmp_path / "bundle"


def test_a_bundle_arrives_as_it_was_sent(written: Path) -> None:
    bundle = read_bundle(written)
    assert bundle.artefacts == ARTEFACTS
    assert encode_trajectory(bundle.draft) == encode_trajectory(random_trajectory(3))


def test_every_flipped_byte_is_noticed(written: Path) -> None:
    data = written.read_bytes()
    for position in range(0, len(data), 97):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        written.write_bytes(damaged)
        with pytest.raises(CorruptRecordError, match="damaged"):
            read_bundle(written)


def test_a_bundle_that_is_cut_short_is_refused(written: Path) -> None:
    data = written.read_bytes()
    for length in (0, 5, len(data) // 2, len(data) - 1):
        written.write_bytes(data[:length])
        with pytest.raises(CorruptRecordError):
            read_bundle(written)
