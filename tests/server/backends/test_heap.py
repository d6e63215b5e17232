"""What is freed while weights are loaded goes back to the system, and afterwards memory is kept as usual."""

from __future__ import annotations

import subprocess
import sys

from tests.running import ROOT

# Matrices that come and go, with something small that stays between them: on an ordinary heap it pins what was freed.
STORY = """
import resource, torch
from pathlib import Path
from server.backends.cpu.memory import freed_at_once

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def load():
    kept, most, before = [], 0, resident()
    for i in range(60):
        matrices = [torch.ones(5 << 18) for _ in range(8)]  # 5 MiB each
        kept.append([torch.ones(256) for _ in range(8)])
        most = max(most, resident() - before)
        matrices.pop(i % 8)
    return most

torch.set_num_threads(1)
torch.ones(1 << 18)
with freed_at_once():
    most = load()
assert most < 44 << 20, most  # 1,365 MiB on an ordinary heap
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    torch.ones(1 << 20)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert faults < 25 * 1024, faults  # 50 * 1024 if each of them came as new pages from the system
"""


def test_memory_that_is_freed_while_loading_is_given_back() -> None:
    result = subprocess.run([sys.executable, "-c", STORY], cwd=ROOT, capture_output=True, text=True)
    assert 0 == result.returncode, result.stderr
