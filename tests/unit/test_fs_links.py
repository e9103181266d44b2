"""A name is ours when it reads as ours, whatever the link's errno said."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcroll.errors import CorruptRecordError
from hpcroll.fs import claim_name, read_token

Link = Callable[[Path, Path], None]


def make_token(directory: Path, incarnation: str) -> Path:
    path = directory / f"{incarnation}.json"
    path.write_text(json.dumps({"incarnation": incarnation}))
    return path


def failing(code: int, *, after: bool = False, times: int = 1_000) -> Link:
    """A link that answers `code` for the first `times` calls; `after`: having done its work."""
    calls = 0

    def link(source: Path, name: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > times or after:
            os.link(source, name)
        if calls <= times:
            raise OSError(code, os.strerror(code))

    return link


def test_first_claim_wins_and_stays(tmp_path: Path) -> None:
    a, b, name = make_token(tmp_path, "a"), make_token(tmp_path, "b"), tmp_path / "n.a1"
    assert claim_name(a, name)
    assert not claim_name(b, name)
    assert claim_name(a, name), "a repeated claim of ours is ours"
    assert read_token(name) == "a"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EEXIST, errno.EIO, errno.ESTALE, errno.EACCES])
def test_claim_that_failed_in_words_only_is_ours(tmp_path: Path, code: int) -> None:
    assert claim_name(make_token(tmp_path, "a"), tmp_path / "n", link=failing(code, after=True, times=1))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO, errno.EEXIST])
def test_contested_claim_is_theirs_whatever_the_errno(tmp_path: Path, code: int) -> None:
    assert claim_name(make_token(tmp_path, "a"), tmp_path / "n")
    assert not claim_name(make_token(tmp_path, "b"), tmp_path / "n", link=failing(code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMLINK])
def test_errors_that_mean_what_they_say_are_raised(tmp_path: Path, code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)):
        claim_name(make_token(tmp_path, "a"), tmp_path / "n", link=failing(code))


def test_passing_trouble_is_tried_again(tmp_path: Path) -> None:
    assert claim_name(make_token(tmp_path, "a"), tmp_path / "n", link=failing(errno.EIO, times=2))


def test_claim_that_nobody_has_is_not_called_lost(tmp_path: Path) -> None:
    """False would say that another has it; then nobody might ever commit this rollout."""
    with pytest.raises(OSError, match="Input/output error"):
        claim_name(make_token(tmp_path, "a"), tmp_path / "n", link=failing(errno.EIO))


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b'{"incarnation": 3}', b'{"other": "a"}'])
def test_name_that_is_no_token_is_reported_as_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n").write_bytes(content)
    with pytest.raises(CorruptRecordError, match=str(tmp_path / "n")):
        read_token(tmp_path / "n")


def test_missing_name_has_no_token(tmp_path: Path) -> None:
    assert read_token(tmp_path / "n") is None
