"""Images: what is taken for one, and that none appears before it is whole."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hpcroll.errors import ImageError
from hpcroll.sandboxes import image_store, images

PAYLOAD = b"x" * 5000

FAKE = """#!/bin/sh
# A stand-in for apptainer, which behaves as the file `mode` beside it says.
here=$(dirname "$(readlink -f "$0")")
case "$1" in
  --version) echo "apptainer version 1.4.5" ;;
  --quiet) [ "$(cat "$here/mode")" != unstartable ] || { echo "FATAL: no such exec format" >&2; exit 255; } ;;
  pull|build)
    for argument; do case "$argument" in *.part*|*.sif) dest=$argument ;; esac; done
    head -c 300000 /dev/zero | tr '\\0' 'e' >&2
    case "$(cat "$here/mode")" in
      fails) echo "FATAL: manifest unknown" >&2; exit 255 ;;
      hangs) sleep 600 ;;
      nothing) exit 0 ;;
      truncated) head -c 3000 "$here/whole.sif" > "$dest" ;;
      *) cp "$here/whole.sif" "$dest" ;;
    esac ;;
esac
"""


def write_sif(path: Path, payload: bytes = PAYLOAD) -> Path:
    head = struct.pack(
        "<32s10s22x6q2q", b"#!/usr/bin/env run\n", b"SIF_MAGIC\0", 0, 0, 0, 0, 0, 0, 128, len(payload)
    )
    path.write_bytes(head + payload)
    return path


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how the stand-in runtime behaves."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "apptainer").write_text(FAKE)
    (folder / "apptainer").chmod(0o755)
    write_sif(folder / "whole.sif")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    mode = folder / "mode"
    mode.write_text("works")
    return mode


def pull(tmp_path: Path, **options: float) -> str:
    return image_store.pull("docker://example/image:1", tmp_path / "out.sif", scratch=tmp_path, **options)


def test_a_missing_image_says_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nowhere\.sif does not exist"):
        images.locate(str(tmp_path / "nowhere.sif"))
    with pytest.raises(ImageError, match=r"sandbox\.image"):
        images.locate(None)


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.sif").write_text("no image")
    (tmp_path / "empty").mkdir()
    for name in ("text.sif", "empty"):
        with pytest.raises(ImageError, match=name):
            images.locate(str(tmp_path / name))


def test_a_sif_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_sif(tmp_path / "image.sif")
    assert images.locate(str(path)) == path
    whole = path.read_bytes()
    for size in (len(whole) - 1, 200, 100, 10, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(ImageError, match=r"image\.sif"):
            images.locate(str(path))


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    path = write_sif(tmp_path / "image.sif")
    first = images.digest(path)
    assert images.digest(path) == first
    write_sif(path, PAYLOAD + b"y")
    assert images.digest(path) != first


def test_the_listing_names_broken_images_with_their_problem(tmp_path: Path) -> None:
    write_sif(tmp_path / "good.sif")
    (tmp_path / "bad.sif").write_bytes((tmp_path / "good.sif").read_bytes()[:500])
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "root" / "bin" / "sh").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / ".hidden.sif").touch()
    found = {info.path.name: info for info in images.listing(tmp_path)}
    assert found.keys() == {"good.sif", "bad.sif", "root"}
    assert found["good.sif"].problem == ""
    assert "cut off" in found["bad.sif"].problem


def test_a_pulled_image_is_whole_and_its_digest_is_returned(tmp_path: Path, runtime: Path) -> None:
    digest = pull(tmp_path)
    assert digest == images.digest(tmp_path / "out.sif")
    assert (tmp_path / "out.sif").read_bytes() == (runtime.parent / "whole.sif").read_bytes()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("fails", "manifest unknown"),
        ("nothing", "was not made"),
        ("truncated", "cut off"),
        ("unstartable", "no such exec format"),
    ],
)
def test_a_failed_pull_leaves_the_old_image_and_nothing_else(
    tmp_path: Path, runtime: Path, mode: str, words: str
) -> None:
    old = write_sif(tmp_path / "out.sif", b"old").read_bytes()
    runtime.write_text(mode)
    with pytest.raises(ImageError, match=words):
        pull(tmp_path)
    assert (tmp_path / "out.sif").read_bytes() == old
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_pull_that_hangs_is_ended(tmp_path: Path, runtime: Path) -> None:
    runtime.write_text("hangs")
    with pytest.raises(ImageError, match="not done after 2 s"):
        pull(tmp_path, timeout_s=2)
    assert not (tmp_path / "out.sif").exists()


def test_a_bad_uri_or_destination_is_told_before_anything_runs(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(ImageError, match="docker://"):
        image_store.pull("ftp://x", tmp_path / "out.sif", scratch=tmp_path)
    with pytest.raises(ImageError, match="make it first"):
        image_store.pull("docker://x", tmp_path / "no" / "out.sif", scratch=tmp_path)
    with pytest.raises(ImageError, match=r"missing\.def"):
        image_store.build(str(tmp_path / "missing.def"), tmp_path / "out.sif", scratch=tmp_path)


def test_a_build_never_asks_for_root(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "image.def").write_text("Bootstrap: scratch\n")
    sudo = runtime.parent / "sudo"
    sudo.write_text(f"#!/bin/sh\ntouch {tmp_path}/sudo-was-called\n")
    sudo.chmod(0o755)
    digest = image_store.build(str(tmp_path / "image.def"), tmp_path / "out.sif", scratch=tmp_path)
    assert digest == images.digest(tmp_path / "out.sif")
    assert not (tmp_path / "sudo-was-called").exists()


def test_the_version_is_the_runtimes(tmp_path: Path, runtime: Path) -> None:
    assert image_store.version(scratch=tmp_path) == "apptainer version 1.4.5"
