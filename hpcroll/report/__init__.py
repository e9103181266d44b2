"""What people are shown of a run, of a host and of a server."""

from hpcroll.report.doctor import examine
from hpcroll.report.finding import Finding, Level, print_findings
from hpcroll.report.logs import log_tails, rollout_events
from hpcroll.report.rendering import print_status, render_status, status_line, watch_status
from hpcroll.report.shards import list_shard_files, trajectory_lines
from hpcroll.report.status import RunStatus, StatusObserver
from hpcroll.report.trajectories import print_trajectory

__all__ = [
    "Finding",
    "Level",
    "RunStatus",
    "StatusObserver",
    "examine",
    "list_shard_files",
    "log_tails",
    "print_findings",
    "print_status",
    "print_trajectory",
    "render_status",
    "rollout_events",
    "status_line",
    "trajectory_lines",
    "watch_status",
]
