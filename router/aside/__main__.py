"""One process that does tasks aside: `python -m router.aside NICENESS MEMORY_MB MODULE ARGUMENT`, started by `pool.py`.

It imports what it works with, and forks a child that does the tasks: whoever kills that child has the next one at once.
A child says {"pid": …} once it is ready. Then it reads one line of JSON for each task and answers with one:
{"result": …}, or {"error": "…"}. All run at the priority that they are told, and take no more memory.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import TextIO

from router.aside import Task, TaskError
from server.process import end_with_parent

MEGABYTE = 2**20


def main() -> int:
    """Do tasks until standard input ends. Returns the exit code."""
    niceness, memory_mb, module, argument = sys.argv[1:]
    os.nice(int(niceness))
    most = int(memory_mb) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    tasks = importlib.import_module(module).tasks(argument)
    end_with_this = end_with_parent()
    before: int | None = None
    while child := os.fork():
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        if ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0):
            return 0
        if before is not None:
            os.waitpid(before, 0)
        before = child  # its number is no other process's until the next one has ended: who kills it late kills nobody
    if end_with_this is not None:
        end_with_this()
    _serve(tasks, answers)
    os._exit(0)


def _serve(tasks: Mapping[str, Task], answers: TextIO) -> None:
    """Do tasks until standard input ends. Nobody else reads of that: an order comes once the one before is answered."""
    # The one before may have been killed in the middle of a line.
    print(f"\n{json.dumps({'pid': os.getpid()})}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(tasks, json.loads(line))), file=answers, flush=True)


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
