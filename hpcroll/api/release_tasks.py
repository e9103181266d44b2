"""Builds a task from two releases of a package, in the sandbox that the config names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from hpcroll.api.configuring import read_config
from hpcroll.api.validation import check_config
from hpcroll.config.load import describe
from hpcroll.errors import ConfigError
from hpcroll.tasks import ReleasePair, from_sdist


def build_release_task(
    package: str,
    old: str,
    new: str,
    *,
    out_dir: Path,
    config: Path | None = None,
    image: str | None = None,
    tests: Sequence[str] = (),
    library: Sequence[str] = (),
) -> Path:
    """Builds the task below `out_dir` and returns its task file; see `tasks.from_sdist`.

    Raises `ConfigError` for a pair that makes no task, `ImageError` for a missing image.
    """
    provider = check_config(read_config(config))
    provider.check(image)
    try:
        pair = ReleasePair(
            package=package, old=old, new=new, tests_paths=tuple(tests), library_paths=tuple(library)
        )
    except ValidationError as error:
        raise ConfigError(f"release pair: {describe(error)}") from error
    from_sdist(pair, out_dir, provider=provider, image=image)
    return out_dir / pair.name / "task.jsonl"
