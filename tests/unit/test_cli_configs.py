"""Every example config loads, names known plug-ins, and is in the reference."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from hpcroll.api.validation import check_config
from hpcroll.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_config_is_valid(path: Path) -> None:
    check_config(load_config(path))


def test_there_is_an_example_for_each_launcher_and_for_legs() -> None:
    configs = [load_config(path) for path in EXAMPLES]
    assert {config.launch.launcher for config in configs} == {"local", "slurm"}
    assert max(len(config.legs) for config in configs) == 2


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a config model, dotted."""
    found = []
    for name, field in model.model_fields.items():
        models = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if models:
            found += keys(models[0], f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def test_reference_names_every_key_of_the_config_and_no_other() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text()
    rows = [line.split("|")[1].strip().strip("`") for line in text.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(keys(RunConfig))
