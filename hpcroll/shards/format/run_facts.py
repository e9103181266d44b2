"""What a reader must know of a run, from run.json alone; the trainer's side needs no config models."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hpcroll.contract import require_major
from hpcroll.errors import ShardError
from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths

_READABLE_MAJOR = 1


@dataclass(frozen=True, slots=True)
class RunFacts:
    """`final_leg` is the one whose `done` names say that a rollout is committed."""

    run_id: str
    final_leg: str
    allow_shaped_logprobs: bool


def read_run_facts(paths: RunPaths) -> RunFacts:
    """The facts of the run at `paths`; raises `ShardError` where there is none or run.json is damaged."""
    data = read_fresh(paths.run_json)
    if data is None:
        raise ShardError(f"{paths.root} holds no run (no run.json); check the path")
    try:
        run = json.loads(data)
        require_major(run["schema_version"], _READABLE_MAJOR, paths.run_json)
        config = run["config"]
        return RunFacts(
            run_id=run["run_id"],
            final_leg="+".join(config["legs"][-1]),
            allow_shaped_logprobs=bool(config["model"]["train_on_shaped_logprobs"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ShardError(f"{paths.run_json} is damaged or was edited: {error!r}") from error
