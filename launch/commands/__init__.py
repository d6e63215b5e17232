"""The commands beside a launch: `lockstep check`, `watermark`, `quantize`, `merge`, `batch` and `tls`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from host.output import Output
from launch.logs import Log
from launch.models import resolve_adapter, resolve_model


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
    from launch.commands import jobs, quantize  # a launch needs no tokenizer

    command = quantize.read_command(argv, environ)
    model = resolve_model(command.settings, environ, Log(Output(2), False))
    return jobs.run(
        "server.quantize", command.job(model.path, model.weights_path, model.tokenizer_path).to_json(), environ
    )


def merge_adapter(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command `lockstep merge`. Returns the exit code; raises Refusal."""
    from launch.commands import jobs, merge

    command, log = merge.read_command(argv, environ), Log(Output(2), False)
    model = resolve_model(command.settings, environ, log)
    adapter = resolve_adapter(command.adapter, command.settings, environ, log)
    return jobs.run("server.merge", command.job(model, adapter).to_json(), environ)


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
    "merge": merge_adapter,
    "batch": answer_batch,
    "tls": make_certificates,
}
