"""Hidden tests run by pytest, told apart by their node ids."""

from __future__ import annotations

from typing import ClassVar

from hpcroll.evaluators.test_ids import Reporter, RepositoryEvaluator

# A test passes by its call phase, and fails by any phase; one that is expected to fail never passes. The
# variable that loads the reporter is taken away, so that pytest runs started by tests do not report.
_PLUGIN = """\
import json
import os
from pathlib import Path

_REPORT = os.open(Path(__file__).with_suffix(".jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.environ.pop("PYTEST_ADDOPTS", None)


def _write(nodeid, passed):
    os.write(_REPORT, (json.dumps({"id": nodeid, "passed": passed}) + "\\n").encode())


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or hasattr(report, "wasxfail"):
        _write(report.nodeid, False)
    elif report.when == "call":
        _write(report.nodeid, True)


def pytest_collectreport(report):
    if report.outcome == "failed":
        _write(report.nodeid, False)
"""


class PytestEvaluator(RepositoryEvaluator):
    """Runs the test command with a reporter plug-in, whatever options or settings the command has."""

    name: ClassVar[str] = "pytest"
    reporter: ClassVar[Reporter] = Reporter(
        module="hpcroll_report_{token}",
        source=_PLUGIN,
        env={"PYTEST_ADDOPTS": "-p {module}"},
        needs="pytest",
    )
