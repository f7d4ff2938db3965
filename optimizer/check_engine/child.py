"""The process of a check: it reads a task from stdin and writes a line of JSON for each event to stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from .engines import Task
from .stages import run_stages


def main() -> None:
    """Runs the stages of the task. Libraries' output goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def tell(event: dict[str, Any]) -> None:
            print(json.dumps(event, default=str), file=answers, flush=True)

        run_stages(Task.from_json(json.loads(sys.stdin.readline())), tell)


if __name__ == "__main__":
    main()
