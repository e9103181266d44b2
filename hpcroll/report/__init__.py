"""What people are shown of a run, of a host and of a server."""

from hpcroll.report.doctor import examine
from hpcroll.report.finding import Finding, Level, print_findings
from hpcroll.report.logs import log_tails, rollout_events
from hpcroll.report.rendering import print_status, render_status, status_line, watch_status
from hpcroll.report.seal_view import seal_lines
from hpcroll.report.shards import list_shard_files, row_listing, trajectory_lines
from hpcroll.report.status import RunStatus, StatusObserver
from hpcroll.report.token_view import load_decoder
from hpcroll.report.trajectories import print_trajectory, trajectory_json

__all__ = [
    "Finding",
    "Level",
    "RunStatus",
    "StatusObserver",
    "examine",
    "list_shard_files",
    "load_decoder",
    "log_tails",
    "print_findings",
    "print_status",
    "print_trajectory",
    "render_status",
    "rollout_events",
    "row_listing",
    "seal_lines",
    "status_line",
    "trajectory_json",
    "trajectory_lines",
    "watch_status",
]
