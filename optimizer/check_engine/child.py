"""The process of a check: it reads a task from stdin and writes a line of JSON for each event to a pipe.

Its argument is the pipe's file descriptor. Libraries may write to stdout at any time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from .engines import Task
from .stages import run_stages


def main() -> None:
    """Runs the stages of the task on stdin, and writes a line of JSON for each event to the pipe."""
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:

        def tell(event: dict[str, Any]) -> None:
            print(json.dumps(event, default=str), file=answers, flush=True)

        run_stages(Task.from_json(json.loads(sys.stdin.readline())), tell)


if __name__ == "__main__":
    main()
