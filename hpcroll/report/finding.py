"""What an examination found: one fact, whether it is a problem, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, with a limit that one should know."""
    ERROR = "error"
    """Rollouts would fail or could not be trained on."""


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about this host, a file system, a scheduler, a sandbox or a server."""

    area: str
    level: Level
    text: str
    advice: str = ""

    @property
    def is_error(self) -> bool:
        return self.level is Level.ERROR

    def to_dict(self) -> dict[str, str]:
        """The finding as JSON values."""
        return asdict(self)


def print_findings(findings: list[Finding]) -> None:
    """Prints one line per finding, with its advice beneath."""
    console = Console()
    for finding in findings:
        line = Text()
        line.append(f"{finding.level.value:8}", style=_STYLES[finding.level])
        line.append(f"{finding.area}: ", style="bold").append(finding.text)
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"        {finding.advice}", style="dim"), soft_wrap=True)
