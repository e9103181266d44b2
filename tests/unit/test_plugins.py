"""Plug-ins: by name, by dotted path, and how an unknown one is refused."""

from __future__ import annotations

import pytest

from hpcroll.errors import PluginError
from hpcroll.plugins import Family, known, load

OURS = {
    Family.LAUNCHER: {"local", "slurm"},
    Family.SANDBOX: {"apptainer", "bwrap", "host"},
    Family.HARNESS: {"react"},
    Family.HANDLER: {"swe", "math", "stem", "code", "command"},
}


@pytest.mark.parametrize(("family", "names"), OURS.items())
def test_each_of_ours_loads(family: Family, names: set[str]) -> None:
    assert names <= set(known(family))
    for name in known(family):
        assert isinstance(load(family, name), type)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PluginError, match=r"no sandbox is named 'docker'; known: apptainer, bwrap, host"):
        load(Family.SANDBOX, "docker")


def test_a_dotted_path_needs_no_entry_point() -> None:
    assert load(Family.HANDLER, "hpcroll.handlers.math:MathHandler") is load(Family.HANDLER, "math")


@pytest.mark.parametrize("path", ["no.such.module:Thing", "hpcroll.handlers.math:NoSuchThing"])
def test_a_path_that_does_not_load_says_why(path: str) -> None:
    with pytest.raises(PluginError, match="does not load"):
        load(Family.HANDLER, path)
