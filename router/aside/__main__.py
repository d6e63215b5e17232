"""One process that does tasks aside: `python -m router.aside MEMORY_MB MODULE ARGUMENT`, started by `pool.py`.

It says {} once it is ready. Then it reads one line of JSON for each task and answers with one: {"result": …}, or
{"error": "…"}. It runs at the lowest priority and may take no more memory than it is told.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Mapping

from router.aside import Task, TaskError

MEGABYTE = 2**20


def main() -> int:
    """Do tasks until standard input ends. Returns the exit code."""
    os.nice(19)  # at the same priority as the shards it would make their steps twice as long
    memory_mb, module, argument = sys.argv[1:]
    most = int(memory_mb) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    tasks = importlib.import_module(module).tasks(argument)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(tasks, json.loads(line))), file=answers, flush=True)
    return 0


def _answer(tasks: Mapping[str, Task], order: dict[str, object]) -> dict[str, object]:
    task = tasks[str(order.pop("task"))]
    try:
        return {"result": task(**order)}
    except TaskError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "it takes too much memory"}


if __name__ == "__main__":
    sys.exit(main())
