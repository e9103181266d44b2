"""`python -m hpcroll.worker RUN`: one rank, its parent process first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpcroll.worker.parent import run_rank


def main() -> int:
    """Parses the command line and runs the rank; the exit status of `run_rank`."""
    parser = argparse.ArgumentParser(prog="python -m hpcroll.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--leg", help="leg to work on; the only one where legs are not split")
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    return run_rank(arguments.run_dir, leg=arguments.leg, rank=arguments.rank)


if __name__ == "__main__":
    sys.exit(main())
