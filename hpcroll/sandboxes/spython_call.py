"""One call of spython in a process of its own: `python -m hpcroll.sandboxes.spython_call REQUEST RESULT`.

spython exits the process on errors, has no time-out, and buffers all output: all of it ends here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spython.main import get_client

METHODS = frozenset({"build", "inspect", "pull", "version"})


def main(request: str, result: str) -> None:
    """Calls the method that JSON text `request` names, and writes what it returns to file `result`."""
    call: dict[str, Any] = json.loads(request)
    if call["method"] not in METHODS:
        raise SystemExit(f"spython method {call['method']!r} is not used here")
    answer = getattr(get_client(quiet=call["method"] == "inspect"), call["method"])(**call["arguments"])
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
