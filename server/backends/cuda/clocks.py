"""The clocks and the power of a GPU while it computes: one that is throttled explains what no kernel does.

The driver's own tool is asked, as torch needs a package of its own for them. Left out: why a clock is low.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

FIELDS = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu"
SENTENCE = "SM {} of {} MHz, memory {} of {} MHz, {} of {} W, {} C"
ANSWER_S = 5.0  # that the tool may take


def clocks_during(gpu: str, action: Callable[[], object]) -> str:
    """Run `action`: the clocks and the power of this GPU (its UUID) meanwhile; empty where nobody tells."""
    told: list[str] = []
    is_over = threading.Event()
    asking = threading.Thread(target=_ask, args=(gpu, is_over, told), daemon=True)
    asking.start()
    try:
        action()
    finally:
        is_over.set()
        asking.join(ANSWER_S)
    return told[len(told) // 2] if told else ""


def _ask(gpu: str, is_over: threading.Event, told: list[str]) -> None:
    """Again and again, until it is over; what is answered afterwards is not told."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    while not is_over.is_set():
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return
        values = [value.strip() for value in answer.split(",")]
        if len(values) != len(FIELDS.split(",")):
            return
        if not is_over.is_set():
            told.append(SENTENCE.format(*values))
