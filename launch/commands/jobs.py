"""Commands that make a checkpoint of a model: a process of its own does it, because that needs torch."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from host.process import end_with_parent
from launch.processes import child_environment

# Files of a model's folder that are copied beside its weights; of these, what belongs to a tokenizer.
COMPANIONS = re.compile(
    r"(tokenizer|special_tokens|added_tokens|generation_config|chat_template|vocab|merges|spiece|sentencepiece|LICENSE)"
)
OF_TOKENIZERS = re.compile(r"(tokenizer|special_tokens|added_tokens|chat_template|vocab|merges|spiece|sentencepiece)")


def companions(model: Path, tokenizer: Path, adapter: Path | None = None) -> tuple[str, ...]:
    """The paths of what goes into a new folder as it is.

    A tokenizer in a folder of its own was converted, and replaces the model's; one in an adapter's folder, both.
    """
    found = {p.name: p for folder in (model, tokenizer) for p in sorted(folder.iterdir()) if COMPANIONS.match(p.name)}
    if adapter is not None:
        found |= {p.name: p for p in sorted(adapter.iterdir()) if OF_TOKENIZERS.match(p.name)}
    return tuple(str(path) for path in found.values() if path.is_file())


def run(module: str, job: str, environ: Mapping[str, str]) -> int:
    """Have `python -m MODULE FILE` do a job, which the file has. Returns its exit code."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(job)
        file.flush()
        arguments = [sys.executable, "-P", "-m", module, file.name]
        return _wait_for(
            subprocess.Popen(arguments, env=child_environment(environ, True), preexec_fn=end_with_parent())
        )


def _wait_for(job: subprocess.Popen[bytes]) -> int:
    """The exit code of a process. Signals are passed on to it, so that it cleans up."""
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        job.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)
    code = job.wait()
    if code and received:  # also of a process that was stopped before it handled signals
        return 128 + received[0]
    return code if code >= 0 else 128 - code
