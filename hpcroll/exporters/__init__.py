"""Exporters: a run's trajectories in the formats that trainers and other tools read."""

from hpcroll.exporters.base import Exporter, Fact, GroupSlice, Part, Unit
from hpcroll.exporters.export import ExportCounts, ExportFilters, export_run, make_exporter

__all__ = [
    "ExportCounts",
    "ExportFilters",
    "Exporter",
    "Fact",
    "GroupSlice",
    "Part",
    "Unit",
    "export_run",
    "make_exporter",
]
