"""`python -P -m server.fork_server`: one process that imports what every shard needs, and forks the shards.

Importing torch takes seconds of a core in each process. Here it is done once, for all shards of a launch and for those
that replace them, which therefore begin at once. The launcher writes an order for each shard to standard input, a
socket: the shard's arguments, and with them three pipes, two that become its output and one for its process id. A shard
is forked twice, so that the launcher, which adopts orphans, is its parent: it sees its end, and the end of this process
costs no running shard anything.

No thread and no device may be in use before a fork: threads do not come along, and CUDA does not survive it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence

from host.process import become_child_of, name_process
from server import __main__ as shard

IMPORTED = ("server.ranks.collectives", "server.loading", "server.service")
ORDER_BYTES = 1 << 16
OUTPUTS = (1, 2)  # a shard's standard output and standard error


def main() -> int:
    """Fork shards until the launcher closes its end. Returns the fork server's exit code, and in a fork the shard's."""
    launcher = os.getppid()
    name_process("fork-server")
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a shard would copy these pages to look at them
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            order, pipes, _, _ = socket.recv_fds(orders, ORDER_BYTES, len(OUTPUTS) + 1)
            if not order:
                return 0
            if _is_grandchild():
                break
            for pipe in reversed(pipes):  # the launcher looks at whether a fork came when an output ends
                os.close(pipe)
    *outputs, pid_pipe = pipes
    become_child_of(launcher)
    os.setsid()  # as other children of the launcher: what a shard starts ends with it
    _take_over(outputs)
    os.write(pid_pipe, str(os.getpid()).encode())
    os.close(pid_pipe)
    return shard.main(json.loads(order))


def _is_grandchild() -> bool:
    """Fork twice: True in the grandchild, False here, once the process between has ended. Raises OSError."""
    if between := os.fork():
        _, status = os.waitpid(between, 0)
        if status:
            raise OSError("a process for a shard could not be forked: raise the limit of processes")
        return False
    try:
        is_between = os.fork() > 0
    except OSError:
        os._exit(1)
    if is_between:
        os._exit(0)
    return True


def _take_over(outputs: Sequence[int]) -> None:
    """Put the pipes in the place of this process's output, and nothing in that of its input."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for pipe, output in zip(outputs, OUTPUTS, strict=True):
        os.dup2(pipe, output)
        os.close(pipe)


if __name__ == "__main__":
    sys.exit(main())
