"""The command line's reference and help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from hpcroll.cli.main import app, run

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
ROOT = Path(__file__).parents[2]


def commands() -> set[str]:
    """Every command, groups as `group command`."""
    found = set()
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {name} if inner is None else {f"{name} {leaf}" for leaf in inner}
    return found


def test_reference_names_every_command_and_no_other() -> None:
    named = set()
    for line in REFERENCE.read_text().splitlines():
        if line.startswith("| `hpcroll "):
            for match in re.findall(r"`hpcroll ([a-z-]+)(?: ([a-z][a-z-]*))?", line.split("|")[1]):
                named.add(" ".join(word for word in match if word))
    assert named == commands()


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_of_every_command_says_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: hpcroll {name}")
    assert len(text.split("\n\n")[1].strip()) > 20


@pytest.mark.parametrize("path", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_between_documents_lead_somewhere(path: str) -> None:
    document = ROOT / path
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{path} links to {target}"
