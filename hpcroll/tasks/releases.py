"""`swe` tasks from two releases of a package whose source distributions ship their tests."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import shutil
from pathlib import Path

from pydantic import Field

from hpcroll.config import Strict
from hpcroll.contract import Task
from hpcroll.errors import ConfigError
from hpcroll.evaluators.repository import PRIVATE, RepositorySpec
from hpcroll.evaluators.trees import tree_sha256
from hpcroll.fs import fsync_directory
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.tasks.archives import list_files, pack
from hpcroll.tasks.bench import Bench
from hpcroll.tasks.files import read_tasks, write_tasks
from hpcroll.tasks.packages import fetch_sdist, install_requirements, required_distributions

TASK_FILE = "task.jsonl"
_NOT_KNOWN_YET = ("(to be found)",)


class ReleasePair(Strict):
    """Two releases of a package; what is left out is found in the source distributions."""

    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the project in the package index."""
    old: str
    """Version that the agent starts from."""
    new: str
    """Version whose tests are hidden, and whose library is the solution."""
    tests_paths: tuple[str, ...] = ()
    """Paths of the tests; `tests`, `test` or `<package>/tests` where absent."""
    library_paths: tuple[str, ...] = ()
    """Paths of the library; `src/<package>`, `<package>` or `<package>.py` where absent."""
    test_command: str = ""
    """Shell line that runs the tests; pytest over the tests' paths where absent."""
    requirements: tuple[str, ...] = ()
    """What the tests need installed; what NEW requires, and pytest, where absent."""
    python: str = Field(default="3.11", pattern=r"^3\.\d+$")
    """Python of the sandbox."""
    problem_statement: str = ""
    """What is wrong in OLD, in words; where absent, the names of the tests that fail."""

    @property
    def name(self) -> str:
        """Name of the task and of its directory."""
        return f"{self.package}-{self.old}-{self.new}"


def from_sdist(
    pair: ReleasePair, out_dir: Path, *, provider: SandboxProvider, image: str | None = None, runs: int = 2
) -> Task:
    """Builds the task in `out_dir/<package>-<old>-<new>/`, which appears whole or not at all.

    Tests that do not behave alike in all `runs` runs are left out. Returns the task, its paths absolute;
    the directory's `task.jsonl` has them relative. Raises `ConfigError` where the directory exists, the
    index lacks a release, or no test tells OLD from NEW.
    """
    return asyncio.run(build(pair, out_dir, provider=provider, image=image, runs=runs))


async def build(
    pair: ReleasePair, out_dir: Path, *, provider: SandboxProvider, image: str | None = None, runs: int = 2
) -> Task:
    """`from_sdist` for callers with an event loop."""
    target = out_dir / pair.name
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or choose another directory")
    work = out_dir / f".{pair.name}.{secrets.token_hex(4)}"
    (work / "task").mkdir(parents=True)
    try:
        spec = await asyncio.to_thread(_pack_inputs, pair, work)
        bench = Bench(pair.name, provider, image=image, runs=runs)
        spec = await bench.complete(spec, work / "gold.tar.zst")
        _write(pair, spec, image, work / "task")
        try:
            (work / "task").rename(target)
        except OSError as error:
            raise ConfigError(f"{target} cannot be created: {error.strerror}") from error
        fsync_directory(out_dir)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
    return load_release_task(target)


def load_release_task(directory: Path) -> Task:
    """The task of a directory that `from_sdist` wrote, its paths absolute; raises `ConfigError`."""
    task = read_tasks(directory / TASK_FILE)[0]
    paths = {name: str((directory / str(task.spec[name])).absolute()) for name in ("repo", "tests", "deps")}
    return task.model_copy(update={"spec": {**task.spec, **paths}})


def _pack_inputs(pair: ReleasePair, work: Path) -> RepositorySpec:
    """Fetches and packs all that the tests will need; `gold.tar.zst` stays outside the task's directory."""
    old = fetch_sdist(pair.package, pair.old, work / "old")
    new = fetch_sdist(pair.package, pair.new, work / "new")
    module = pair.package.replace("-", "_").replace(".", "_").lower()
    tests = pair.tests_paths or _found(pair, new, ("tests", "test", f"{module}/tests"), "tests_paths")
    places = (f"src/{module}", module, f"{module}.py")
    library = pair.library_paths or _found(pair, new, places, "library_paths")
    for path in (*tests, *library):
        if not (new / path).exists():
            raise ConfigError(f"{pair.package} {pair.new} has no {path} in its source distribution")
    requirements = list(pair.requirements) or [*required_distributions(new), "pytest"]
    install_requirements(requirements, work / "deps", python=pair.python)
    _take_over(old, new, library, tests, work / "gold")
    pack(old, work / "task" / "repo.tar.zst")
    pack(new, work / "task" / "tests.tar.zst", only=tests)
    pack(work / "deps", work / "task" / "deps.tar.zst")
    pack(work / "gold", work / "gold.tar.zst")
    return RepositorySpec(
        repo=str((work / "task" / "repo.tar.zst").absolute()),
        tests=str((work / "task" / "tests.tar.zst").absolute()),
        deps=str((work / "task" / "deps.tar.zst").absolute()),
        tests_paths=tests,
        test_command=pair.test_command or _pytest_line(library, tests),
        fail_to_pass=_NOT_KNOWN_YET,
        python=pair.python,
    )


def _take_over(old: Path, new: Path, library: tuple[str, ...], tests: tuple[str, ...], target: Path) -> None:
    """Makes `target`: the tree of OLD with the library of NEW, tests inside the library left as in OLD."""
    shutil.copytree(old, target, symlinks=True)
    for path in library:
        for stale in list(list_files(target / path, {target / test for test in tests})):
            stale.unlink()
        for fresh in list_files(new / path, {new / test for test in tests}):
            copy = target / fresh.relative_to(new)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(fresh, copy, follow_symlinks=False)


def _write(pair: ReleasePair, spec: RepositorySpec, image: str | None, directory: Path) -> None:
    named = {name: f"{name}.tar.zst" for name in ("repo", "tests", "deps")}
    digests = {name: tree_sha256(str(directory / path)) for name, path in named.items()}
    fields = spec.model_copy(update={**named, "content_sha256": digests})
    task = Task(
        task_id=pair.name,
        handler="swe",
        dataset="sdist",
        image=image,
        prompt=_prompt(pair, spec),
        spec=fields.model_dump(mode="json", exclude_defaults=True),
        metadata={"package": pair.package, "old": pair.old, "new": pair.new},
    )
    write_tasks([task], directory / TASK_FILE)


def _prompt(pair: ReleasePair, spec: RepositorySpec) -> str:
    problem = pair.problem_statement or (
        f"These tests of {pair.package} {pair.new} fail on the code in this directory:\n"
        + "\n".join(f"- {test}" for test in spec.fail_to_pass)
    )
    return (
        f"The current directory is a git repository with the source of {pair.package} {pair.old}.\n\n"
        f"{problem}\n\n"
        f"Change the code so that this is put right; changes to {', '.join(spec.tests_paths)} do not count. "
        f"{PRIVATE}/bin/python is a Python {pair.python} with everything that the tests need. "
        "Submit when you are done; hidden tests then look at the files of this directory."
    )


def _pytest_line(library: tuple[str, ...], tests: tuple[str, ...]) -> str:
    root = "src" if all(path.startswith("src/") for path in library) else "."
    options = "-q -p no:cacheprovider --continue-on-collection-errors -o addopts= --rootdir=."
    return f"PYTHONPATH={root} python -m pytest {options} {shlex.join(tests)}"


def _found(pair: ReleasePair, tree: Path, places: tuple[str, ...], field: str) -> tuple[str, ...]:
    for place in places:
        if (tree / place).exists():
            return (place,)
    raise ConfigError(
        f"{pair.package} {pair.new} has none of {', '.join(places)} in its source distribution; give {field}"
    )
