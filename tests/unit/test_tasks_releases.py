"""Tasks from package releases: fetched without running them, packed reproducibly, refused with a reason."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from hpcroll.errors import ConfigError
from hpcroll.tasks.archives import pack
from hpcroll.tasks.packages import fetch_sdist, required_distributions, unpack_sdist


def sdist(name: str, files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{name}/{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


class Index(http.server.ThreadingHTTPServer):
    """A package index with one project."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.files: dict[str, bytes] = {}
        self.digests: dict[str, str] = {}

    def add(self, name: str, data: bytes, *, digest: str | None = None) -> None:
        self.files[name] = data
        self.digests[name] = digest or hashlib.sha256(data).hexdigest()


class _Page(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        links = (
            f'<a href="/{file}#sha256={digest}">{file}</a>' for file, digest in self.server.digests.items()
        )
        body = self.server.files.get(name) or f"<html><body>{''.join(links)}</body></html>".encode()
        found = self.path == "/simple/sample/" or name in self.server.files
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple/")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_source_is_fetched_from_the_index_of_pips_settings_and_never_run(
    index: Index, tmp_path: Path
) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    index.add("sample-1.0.tar.gz", sdist("sample-1.0", {"setup.py": trap, "sample.py": "x = 1\n"}))
    index.add("sample-1.1.tar.gz", sdist("sample-1.1", {"sample.py": "x = 2\n"}))
    tree = fetch_sdist("sample", "1.0", tmp_path)
    assert (tree / "sample.py").read_text() == "x = 1\n"
    assert not (tmp_path / "ran").exists()


def test_release_without_a_source_distribution_is_refused_by_name(index: Index, tmp_path: Path) -> None:
    index.add("sample-1.0-py3-none-any.whl", b"wheel")
    with pytest.raises(ConfigError, match=r"sample has no source distribution of version 1\.0"):
        fetch_sdist("sample", "1.0", tmp_path)
    with pytest.raises(ConfigError, match="other has no source distribution"):
        fetch_sdist("other", "1.0", tmp_path)


def test_file_with_another_digest_is_refused(index: Index, tmp_path: Path) -> None:
    index.add("sample-1.0.tar.gz", sdist("sample-1.0", {"a": "b"}), digest="0" * 64)
    with pytest.raises(ConfigError, match="cannot be fetched"):
        fetch_sdist("sample", "1.0", tmp_path)


def test_archive_that_climbs_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.tar.gz").write_bytes(sdist("x/../..", {"evil": "1"}))
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack_sdist(tmp_path / "bad.tar.gz", tmp_path / "deep" / "tree")
    assert not (tmp_path / "evil").exists()


def test_requirements_of_extras_are_left_out(tmp_path: Path) -> None:
    info = "Name: x\nRequires-Dist: alpha>=1\nRequires-Dist: beta ; extra == 'test'\nRequires-Dist: gamma\n"
    (tmp_path / "PKG-INFO").write_text(info)
    assert required_distributions(tmp_path) == ["alpha>=1", "gamma"]


def test_same_files_make_the_same_archive_whatever_their_times_and_modes(tmp_path: Path) -> None:
    def tree(name: str, order: list[str], mode: int, time: int) -> Path:
        root = tmp_path / name
        for path in order:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(path)
            (root / path).chmod(mode)
            os.utime(root / path, (time, time))
        (root / "__pycache__").mkdir()
        (root / "__pycache__" / "x.pyc").write_bytes(name.encode())
        return root

    pack(tree("one", ["a/b", "c", "d/e/f"], 0o644, 10**9), tmp_path / "one.tar.zst")
    pack(tree("two", ["d/e/f", "c", "a/b"], 0o664, 10**9 + 5), tmp_path / "two.tar.zst")
    assert (tmp_path / "one.tar.zst").read_bytes() == (tmp_path / "two.tar.zst").read_bytes()
    pack(tmp_path / "one", tmp_path / "part.tar.zst", only=["a", "d"], without=["d/e"])
    data = zstandard.ZstdDecompressor().decompress((tmp_path / "part.tar.zst").read_bytes())
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["a/b"]
