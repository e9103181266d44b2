"""Harbor reads every ATIF document: `harbor_read.py OUT`, one JSON line per reply with its ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harbor.models.trajectories import Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator

for path in sorted(Path(sys.argv[1]).glob("*.json")):
    validator = TrajectoryValidator()
    assert validator.validate(path), (path, validator.errors)
    trajectory = Trajectory.model_validate_json(path.read_text())
    for one in (trajectory, *(trajectory.subagent_trajectories or ())):
        for step in one.steps:
            if step.metrics is not None and step.metrics.completion_token_ids is not None:
                said = [trajectory.session_id, step.metrics.completion_token_ids, step.metrics.logprobs]
                print(json.dumps(said))
