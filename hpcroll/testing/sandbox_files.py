"""What every sandbox provider promises of files, as tests; part of `SandboxSuite`."""

from __future__ import annotations

import os
import secrets
import tarfile
from pathlib import Path

import pytest
import zstandard

from hpcroll.errors import SandboxError
from hpcroll.sandboxes.base import Sandbox
from hpcroll.testing.sandbox_bench import PATIENCE_S, SandboxBench, sh


class FilePromises(SandboxBench):
    """Promises of `put`, `get` and `put_tree`."""

    def test_files_go_in_and_out_with_their_mode(self, tmp_path: Path) -> None:
        data = os.urandom(1 << 20)

        async def body(sandbox: Sandbox) -> None:
            await sandbox.put(data, "some/new/place/file", mode=0o755)
            assert await sandbox.get("some/new/place/file") == data
            assert await sandbox.get(f"{sandbox.workdir}/some/new/place/file") == data
            mode = await sandbox.exec(["stat", "-c", "%a", "some/new/place/file"], timeout_s=PATIENCE_S)
            assert mode.stdout == b"755\n"

        self.run(tmp_path, body)

    def test_put_replaces_a_planted_link_instead_of_following_it(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            await sandbox.exec(sh("echo old > target; ln -s target link"), timeout_s=PATIENCE_S)
            await sandbox.put(b"new", "link")
            assert await sandbox.get("target") == b"old\n"
            assert await sandbox.get("link") == b"new"

        self.run(tmp_path, body)

    def test_get_of_what_is_no_file_says_so_and_never_waits(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            await sandbox.exec(
                sh("mkfifo pipe; mkdir dir; ln -s /dev/zero zero; echo x > f"), timeout_s=PATIENCE_S
            )
            with pytest.raises(FileNotFoundError):
                await sandbox.get("missing")
            with pytest.raises(FileNotFoundError):
                await sandbox.get("f/below")
            for name in ("pipe", "dir", "zero"):
                with pytest.raises(SandboxError, match=name):
                    await sandbox.get(name)

        self.run(tmp_path, body)

    def test_get_refuses_more_than_its_limit(self, tmp_path: Path) -> None:
        async def body(sandbox: Sandbox) -> None:
            await sandbox.put(b"x" * 1001, "file")
            assert len(await sandbox.get("file", limit_bytes=1001)) == 1001
            with pytest.raises(SandboxError, match="1000 bytes"):
                await sandbox.get("file", limit_bytes=1000)

        self.run(tmp_path, body)

    @pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst"])
    def test_archives_unpack_with_links_and_modes(self, tmp_path: Path, suffix: str) -> None:
        archive = _archive(tmp_path, suffix)

        async def body(sandbox: Sandbox) -> None:
            await sandbox.put_tree(archive, "tree")
            result = await sandbox.exec(["./tree/sub/tool"], timeout_s=PATIENCE_S)
            assert result.stdout == b"ran\n", result.stderr
            assert await sandbox.get("tree/link") == await sandbox.get("tree/sub/tool")
            await sandbox.exec(["rm", "-r", "tree"], timeout_s=PATIENCE_S)

        self.run(tmp_path, body)

    def test_an_archive_that_leads_out_of_its_directory_is_refused(self, tmp_path: Path) -> None:
        archive = tmp_path / "evil.tar"
        with tarfile.open(archive, "w") as file:
            member = tarfile.TarInfo("../outside")
            file.addfile(member)

        async def body(sandbox: Sandbox) -> None:
            with pytest.raises(SandboxError, match="outside"):
                await sandbox.put_tree(archive, "tree")
            with pytest.raises(FileNotFoundError):
                await sandbox.get("outside")

        self.run(tmp_path, body)

    def test_a_broken_archive_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        archive = tmp_path / "broken.tar.zst"
        archive.write_bytes(_archive(tmp_path, "tar.zst").read_bytes()[:-20])

        async def body(sandbox: Sandbox) -> None:
            with pytest.raises(SandboxError, match=r"broken\.tar\.zst"):
                await sandbox.put_tree(archive, "tree")

        self.run(tmp_path, body)


def _archive(tmp_path: Path, suffix: str) -> Path:
    tree = tmp_path / f"tree-{secrets.token_hex(3)}"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "tool").write_text("#!/bin/sh\necho ran\n")
    (tree / "sub" / "tool").chmod(0o755)
    (tree / "link").symlink_to("sub/tool")
    (tree / "sub").chmod(0o555)
    path = tmp_path / f"tree.{suffix}"
    with tarfile.open(path, "w:gz" if suffix == "tar.gz" else "w") as file:
        file.add(tree, arcname=".")
    (tree / "sub").chmod(0o755)
    if suffix == "tar.zst":
        path.write_bytes(zstandard.compress(path.read_bytes()))
    return path
