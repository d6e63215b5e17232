"""The commands beside a launch: `lockstep check`, `watermark`, `quantize`, `batch` and `tls`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from host.output import Output
from host.process import end_with_parent
from launch.logs import Log
from launch.models import resolve_model
from launch.processes import child_environment


def detect_watermark(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep watermark`. Returns the exit code; raises Refusal."""
    from launch.commands import watermark  # a launch needs no tokenizer

    settings, file, as_json = watermark.read_command(argv, environ)
    text = watermark.read_text(file)
    model = resolve_model(settings, environ, Log(Output(2), False), needs_weights=False)
    sys.stdout.write(watermark.report(text, settings, model.path, model.tokenizer_path, as_json=as_json))
    return 0


def quantize_model(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep quantize`. Returns the exit code; raises Refusal."""
    from launch.commands import quantize  # a launch needs no tokenizer

    command = quantize.read_command(argv, environ)
    model = resolve_model(command.settings, environ, Log(Output(2), False))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(command.job(model.path, model.weights_path, model.tokenizer_path).to_json())
        file.flush()
        arguments = [sys.executable, "-P", "-m", "server.quantize", file.name]
        job = subprocess.Popen(arguments, env=child_environment(environ, True), preexec_fn=end_with_parent())
        return quantize.wait_for(job)


def answer_batch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep batch`. Returns the exit code; raises Refusal."""
    from launch.commands import batch  # a launch needs no HTTP client

    return batch.run(batch.read_command(argv, environ), environ)


def make_certificates(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep tls`. Returns the exit code; raises Refusal."""
    from launch.commands import tls  # a launch makes no keys

    folder, days = tls.read_command(argv)
    tls.write(folder, days)
    sys.stdout.write(f"{folder} is made and valid for {days} days: copy it to every node, for --tls-dir\n")
    return 0


def check_launch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep check`. Returns the exit code; raises Refusal."""
    from launch.commands import check  # a launch plans no memory

    return check.run(argv, environ, check.print_text)


COMMANDS = {
    "check": check_launch,
    "watermark": detect_watermark,
    "quantize": quantize_model,
    "batch": answer_batch,
    "tls": make_certificates,
}
