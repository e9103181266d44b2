"""What an export has decided so far: one immutable entry per part, in the output directory.

.hpcroll/export.json        which run, format, options and filters; refused for any other
.hpcroll/parts/<number>     the rollouts of a part, and in the newest the reader's position after it
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcroll.errors import ConfigError, ShardError
from hpcroll.fs import list_names, make_directories, publish, read_fresh, replace


@dataclass(frozen=True, slots=True)
class Decision:
    """The content of part `number`, decided before its files are written."""

    number: int
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """Per group its id and the ids of its rollouts."""
    totals: dict[str, int]
    """What was exported up to and with this part."""
    state: dict[str, Any] | None
    """The reader's position after it; None once a newer part has one."""

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"number": self.number, "groups": self.groups, "totals": self.totals, "state": self.state}
        ).encode()

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Decision:
        """Raises `ShardError` where `data` is no entry."""
        try:
            fields = json.loads(data)
            groups = tuple((group_id, tuple(rollouts)) for group_id, rollouts in fields["groups"])
            return cls(fields["number"], groups, fields["totals"], fields["state"])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"{where} is damaged or was edited: {error!r}; export into an empty directory"
            ) from error


class Ledger:
    """The decisions of the export in directory `out`. Survives being killed at any instant."""

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        """Begins the export, or goes on with it; raises `ConfigError` where `out` holds another one."""
        self._parts = out / ".hpcroll" / "parts"
        make_directories([self._parts])
        path = out / ".hpcroll" / "export.json"
        data = json.dumps(identity, indent=1, sort_keys=True).encode()
        if publish(path, data):
            return
        found = json.loads(read_fresh(path) or b"{}")
        wanted = json.loads(data)
        differing = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
        if differing:
            theirs = ", ".join(f"{key} {found.get(key)!r}" for key in differing)
            ours = ", ".join(f"{key} {wanted.get(key)!r}" for key in differing)
            raise ConfigError(f"{out} holds an export with {theirs}, not {ours}; choose another --out")

    def last(self) -> Decision | None:
        """The newest decision; None before the first."""
        # A listing may be old: whatever it lacks is found by name.
        number = max((int(name) for name in list_names(self._parts) if name.isdecimal()), default=-1)
        while read_fresh(self._parts / str(number + 1)) is not None:
            number += 1
        return self.read(number) if number >= 0 else None

    def read(self, number: int) -> Decision:
        """The decision on part `number`."""
        path = self._parts / str(number)
        data = read_fresh(path)
        if data is None:
            raise ShardError(f"{path} is missing; export into an empty directory")
        return Decision.parse(data, path)

    def decide(self, decision: Decision) -> None:
        """Makes `decision` durable; raises `ShardError` where another process decided otherwise."""
        if not publish(self._parts / str(decision.number), decision.to_bytes()):
            raise ShardError(
                f"part {decision.number} of {self._parts.parent.parent} was decided by another process; end "
                "one of the two exports"
            )
        if decision.number:
            # The name stays, so that nobody can decide the part again; positions would add up.
            before = self.read(decision.number - 1)
            trimmed = Decision(before.number, before.groups, before.totals, None)
            replace(self._parts / str(before.number), trimmed.to_bytes())
