"""A repository in a sandbox: laid out the same way for the agent and for the tests that score it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from hpcroll.config import Strict
from hpcroll.errors import EvaluatorError, ImageError, SandboxError
from hpcroll.evaluators.base import Artefacts
from hpcroll.evaluators.commands import Command, tail
from hpcroll.evaluators.trees import Tree, put_tree
from hpcroll.sandboxes.base import Sandbox

PRIVATE = ".hpcroll"
"""Directory in the work tree for requirements, wrappers and results; never part of a patch."""

_GIT_S = 300.0
_GIT_ENV = {
    # Neither the image's nor a payload's configuration decides what a patch looks like.
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "hpcroll",
    "GIT_AUTHOR_EMAIL": "hpcroll@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "hpcroll",
    "GIT_COMMITTER_EMAIL": "hpcroll@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    "LC_ALL": "C",
}
_NO_GIT, _NO_PYTHON, _WRONG_PYTHON = 90, 91, 92

# info/attributes beats every .gitattributes of the tree: content travels byte for byte.
_NEW_REPOSITORY = """
git -c init.defaultBranch=main init -q --template=
mkdir -p "$GIT_DIR/info"
echo '* -text -filter -ident -working-tree-encoding' > "$GIT_DIR/info/attributes"
echo '/.hpcroll/' > "$GIT_DIR/info/exclude"
printf '[gc]\\n\\tauto = 0\\n[maintenance]\\n\\tauto = false\\n' >> "$GIT_DIR/config"
"""
# -f: a source distribution may hold generated files that its own .gitignore names.
_ADD_ALL = "git add -A -f -- . ':(exclude,top).hpcroll'"

_LAY_OUT = f"""
set -eu
wanted=$1
command -v git > /dev/null || exit {_NO_GIT}
export GIT_DIR="$PWD/.git" GIT_WORK_TREE="$PWD"
rm -rf "$GIT_DIR"
{_NEW_REPOSITORY}
{_ADD_ALL}
git commit -q --allow-empty -m base
unset GIT_DIR GIT_WORK_TREE
python=$(command -v "python$wanted" || command -v python3 || true)
if [ -z "$python" ]; then [ -z "$wanted" ] && exit 0; exit {_NO_PYTHON}; fi
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ -n "$wanted" ] && [ "$found" != "$wanted" ]; then echo "$found"; exit {_WRONG_PYTHON}; fi
if [ -d {PRIVATE}/deps ]; then
    # All that makes a virtual environment: the image's own packages must not decide which tests pass.
    venv="$PWD/{PRIVATE}/venv"
    rm -rf "$venv"
    mkdir -p "$venv/bin" "$venv/lib/python$found"
    printf 'home = %s\\ninclude-system-site-packages = false\\n' "$(dirname "$python")" > "$venv/pyvenv.cfg"
    ln -s "$PWD/{PRIVATE}/deps" "$venv/lib/python$found/site-packages"
    ln -s "$python" "$venv/bin/python"
    python=$venv/bin/python
fi
mkdir -p {PRIVATE}/bin
cat > {PRIVATE}/bin/python <<END
#!/bin/sh
[ -z "\\$HPCROLL_REPORTER" ] || PYTHONPATH="\\$HPCROLL_REPORTER\\${{PYTHONPATH:+:\\$PYTHONPATH}}"
export PYTHONPATH PYTHONNOUSERSITE=1
exec "$python" "\\$@"
END
chmod 755 {PRIVATE}/bin/python
ln -sf python {PRIVATE}/bin/python3
"""

# The base is laid out anew: the agent may have rewritten, broken or deleted the .git that it was given.
_READ_PATCH = f"""
set -eu
top=$PWD
export GIT_DIR="$top/{PRIVATE}/collect/git"
export GIT_WORK_TREE="$top/{PRIVATE}/collect/base"
cd "$GIT_WORK_TREE"
{_NEW_REPOSITORY}
git add -A -f -- .
base=$(git write-tree)
export GIT_WORK_TREE="$top"
cd "$top"
# A nested repository or an unreadable file of the agent costs that path, not the whole patch.
git add -A --ignore-errors -- . ':(exclude,top).hpcroll' || echo "some paths were left out of the patch" >&2
git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \\
    --output="$top/{PRIVATE}/collect/patch" "$base"
wc -c < "$top/{PRIVATE}/collect/patch"
"""


class RepositorySpec(Strict):
    """A repository, and the hidden tests that say whether an agent's change does what was asked."""

    repo: Tree
    """The tree that the agent starts from."""
    tests: Tree
    """The hidden tests; put over the tree once the agent is done, never in its sandbox."""
    tests_paths: tuple[str, ...] = Field(min_length=1)
    """Paths that the hidden tests replace; an agent's changes there are dropped."""
    protected_paths: tuple[str, ...] = (
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "sitecustomize.py",
        "usercustomize.py",
        "pytest.py",
        "pytest",
        "_pytest",
        "unittest.py",
        "unittest",
    )
    """Names, at any depth, whose changes are dropped too: they steer the test runner."""
    test_command: Command
    """Runs the tests at the top of the tree: a shell line, or an argument list."""
    test_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that the test command may take, in seconds; past it the reward is 0."""
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    """Ids of tests that fail before the change and must pass after it."""
    pass_to_pass: tuple[str, ...] | int = ()
    """Ids of tests that must still pass; or how many tests besides `fail_to_pass` must pass."""
    deps: str | None = None
    """Tar archive of a site-packages directory: all that `python` has; the image's own packages if absent."""
    python: str | None = Field(default=None, pattern=r"^3\.\d+$")
    """Python that the image must have, for example "3.11"."""
    evaluator: str = "pytest"
    """Entry point `hpcroll.evaluators` that runs the tests (`pytest`, `unittest`), or a dotted path."""
    gold_patch: str | None = None
    """A patch that solves the task, inline; never in a sandbox of the agent."""
    patch_bytes: int = Field(default=8 << 20, ge=1024, le=16 << 20)
    """Largest patch that counts, in bytes; past it the reward is 0."""
    content_sha256: dict[str, str] = Field(default_factory=dict)
    """Digests of the archives as submitted; filled in by submission."""


async def lay_out(spec: RepositorySpec, sandbox: Sandbox) -> None:
    """The repository in the sandbox's work directory: one base commit, and a `python` with the requirements.

    Raises `ImageError` where the image lacks git or the wanted Python.
    """
    await put_tree(spec.repo, sandbox, sandbox.workdir)
    if spec.deps is not None:
        await put_tree(spec.deps, sandbox, f"{sandbox.workdir}/{PRIVATE}/deps")
    argv = ("sh", "-c", _LAY_OUT, "sh", spec.python or "")
    result = await sandbox.exec(argv, timeout_s=_GIT_S, cwd=sandbox.workdir, env=_GIT_ENV)
    image = sandbox.spec.image or "the default image"
    if result.exit_code == _NO_GIT:
        raise ImageError(f"{image} has no git, which this task needs; use an image with git")
    if result.exit_code in (_NO_PYTHON, _WRONG_PYTHON):
        found = result.stdout.decode(errors="replace").strip() or "none"
        raise ImageError(f"{image} has Python {found}, this task needs {spec.python}; use another image")
    if result.exit_code != 0:
        raise SandboxError(f"the repository could not be laid out in {sandbox.spec.name}: {tail(result)}")


async def read_patch(spec: RepositorySpec, sandbox: Sandbox) -> Artefacts:
    """What the agent changed: `patch`, or `patch_error` where its own doing leaves no usable patch.

    The patch is made against the submitted tree and does not rest on the agent's .git directory. Raises
    `SandboxError` only where the sandbox itself is gone.
    """
    collect = f"{sandbox.workdir}/{PRIVATE}/collect"
    try:
        await sandbox.exec(("rm", "-rf", collect), timeout_s=_GIT_S, cwd="/")
        await sandbox.exec(("mkdir", "-p", f"{collect}/base"), timeout_s=_GIT_S, cwd="/")
        await put_tree(spec.repo, sandbox, f"{collect}/base")
        argv = ("sh", "-c", _READ_PATCH)
        result = await sandbox.exec(argv, timeout_s=_GIT_S, cwd=sandbox.workdir, env=_GIT_ENV)
        if result.exit_code != 0:
            return {"patch_error": f"no patch can be made of the work tree: {tail(result)}".encode()}
        size = int(result.stdout)
        if size > spec.patch_bytes:
            reason = f"the patch has {size} bytes, more than the limit of {spec.patch_bytes}"
            return {"patch_error": reason.encode()}
        return {"patch": await sandbox.get(f"{collect}/patch", limit_bytes=spec.patch_bytes)}
    except SandboxError as error:
        # A full disk or a deleted work directory is the agent's doing; a dead sandbox is not.
        if not await sandbox.alive():
            raise
        return {"patch_error": f"no patch can be made of the work tree: {error}".encode()}


async def apply_patch(spec: RepositorySpec, sandbox: Sandbox, patch: bytes) -> str | None:
    """Applies an agent's patch to a laid-out tree, its changes to tests and test settings left out.

    Returns None, or why the patch does not apply; the tree is then as it was.
    """
    if not patch.strip():
        return None
    path = f"{sandbox.workdir}/{PRIVATE}/patch"
    await sandbox.put(patch, path)
    excludes = [f"--exclude={pattern}" for pattern in _excluded(spec)]
    argv = ("git", "apply", "--whitespace=nowarn", *excludes, path)
    result = await sandbox.exec(argv, timeout_s=_GIT_S, cwd=sandbox.workdir, env=_GIT_ENV)
    return None if result.exit_code == 0 else f"the patch does not apply: {tail(result)}"


async def place_tests(spec: RepositorySpec, sandbox: Sandbox) -> None:
    """The hidden tests in place of whatever stands at their paths."""
    argv = ("rm", "-rf", "--", *spec.tests_paths)
    result = await sandbox.exec(argv, timeout_s=_GIT_S, cwd=sandbox.workdir)
    if result.exit_code != 0:
        raise EvaluatorError(f"old tests could not be removed in {sandbox.spec.name}: {tail(result)}")
    await put_tree(spec.tests, sandbox, sandbox.workdir)


def _excluded(spec: RepositorySpec) -> Iterator[str]:
    # Patterns of git apply: `*` matches `/` as well.
    for path in (*spec.tests_paths, PRIVATE):
        literal = _escape(path.strip("/"))
        yield from (literal, f"{literal}/*")
    for name in spec.protected_paths:
        literal = _escape(name.strip("/"))
        yield from (literal, f"{literal}/*", f"*/{literal}", f"*/{literal}/*")


def _escape(path: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in path)
