"""`python -m hpcroll.cli`: the command, for where its script is not on PATH."""

from hpcroll.cli.main import main

main()
