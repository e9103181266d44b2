"""Source distributions and requirements from a package index, without running code of either.

`pip download` would build an sdist to learn its metadata; here the file is fetched as it lies in the
index. Requirements are installed from wheels only.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from hpcroll.errors import ConfigError

if sys.version_info >= (3, 12):
    import tarfile
else:
    # Extraction filters came with 3.11.4; distributions of 3.11 ship older ones.
    from backports import tarfile

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

_DEFAULT_INDEX = "https://pypi.org/simple/"
_REQUEST_S = 60.0
_PIP_S = 900.0
_PIP_SETTING = re.compile(r"^(?P<section>:env:|[a-z]+)\.(?P<name>[a-z-]+)='(?P<value>.*)'$")


def fetch_sdist(project: str, version: str, directory: Path) -> Path:
    """The source tree of `project` `version`, unpacked below `directory`.

    Uses the index and certificate of pip's settings; the file's digest is checked. Raises `ConfigError`
    where the index has no such source distribution or cannot be reached.
    """
    import requests
    from pypi_simple import (
        DigestMismatchError,
        NoDigestsError,
        NoSuchProjectError,
        PyPISimple,
        UnsupportedContentTypeError,
        UnsupportedRepoVersionError,
    )

    broken = (DigestMismatchError, NoDigestsError, UnsupportedContentTypeError, UnsupportedRepoVersionError)

    settings = pip_settings()
    indexes = [settings.get("index-url", _DEFAULT_INDEX), *settings.get("extra-index-url", "").split()]
    archive = None
    for index in indexes:
        if not index.startswith(("http://", "https://")):
            continue  # pip knows directories too; a source distribution of a release is on a server
        try:
            with PyPISimple(endpoint=index) as client:
                client.s.verify = settings.get("cert", True)
                package = _choose(client.get_project_page(project, timeout=_REQUEST_S).packages, version)
                if package is None:
                    continue
                archive = directory / package.filename
                client.download_package(package, path=archive, timeout=_REQUEST_S)
                break
        except NoSuchProjectError:
            continue
        except (requests.RequestException, *broken) as error:
            raise ConfigError(
                f"{project} {version} cannot be fetched from {_public(index)}: {error}"
            ) from error
    if archive is None:
        raise ConfigError(f"{project} has no source distribution of version {version} in the index")
    return unpack_sdist(archive, directory / f"{project}-{version}-tree")


def unpack_sdist(archive: Path, target: Path) -> Path:
    """Unpacks a source distribution; returns its single top directory. Names that leave it are refused."""
    target.mkdir(parents=True)
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as source:
                source.extractall(target)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{archive} cannot be unpacked: {error}") from error
    tops = [path for path in target.iterdir() if path.is_dir()]
    if len(tops) != 1:
        raise ConfigError(f"{archive} is no source distribution: {len(tops)} directories at its top")
    return tops[0]


def install_requirements(requirements: Sequence[str], target: Path, *, python: str) -> None:
    """Installs `requirements` for Python `python` into directory `target`, from wheels only.

    What depends on this machine (scripts with its interpreter's path, pip's own records) is removed.
    Raises `ConfigError` with pip's words.
    """
    argv = [*_pip(), "install", "--quiet", "--no-compile", "--only-binary=:all:", "--target", str(target)]
    argv += ["--python-version", python, *requirements]
    _run(argv, what=f"the requirements {', '.join(requirements)}")
    shutil.rmtree(target / "bin", ignore_errors=True)
    for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
        for path in target.glob(f"*.dist-info/{name}"):
            path.unlink()


def pip_settings() -> dict[str, str]:
    """pip's settings from its files and environment, by name; the environment goes first."""
    settings: dict[str, str] = {}
    rank = {":env:": 2, "install": 1, "download": 1, "global": 0}
    found = []
    for line in _run([*_pip(), "config", "list"], what="pip's settings").splitlines():
        match = _PIP_SETTING.match(line.strip())
        if match is not None and match["section"] in rank:
            found.append((rank[match["section"]], match["name"], match["value"].replace("\\n", " ")))
    for _, name, value in sorted(found):
        settings[name] = value
    return settings


def required_distributions(tree: Path) -> list[str]:
    """The requirements that a source tree's PKG-INFO names, those of extras left out."""
    info = tree / "PKG-INFO"
    if not info.is_file():
        return []
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [requirement for requirement in named if "extra ==" not in requirement]


def _choose(packages: Sequence[DistributionPackage], version: str) -> DistributionPackage | None:
    for package in packages:
        if (
            package.package_type == "sdist"
            and package.version is not None
            and _same(package.version, version)
        ):
            return package
    return None


def _same(left: str, right: str) -> bool:
    try:
        return Version(left) == Version(right)
    except InvalidVersion:
        return left == right


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{sys.executable} has no pip: python -m ensurepip")
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _run(argv: Sequence[str], *, what: str) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_PIP_S, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{what}: pip took longer than {_PIP_S:g} s") from error
    if done.returncode != 0:
        raise ConfigError(f"{what}: pip failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _public(index: str) -> str:
    return re.sub(r"//[^@/]*@", "//", index)  # never show the password of a private index
