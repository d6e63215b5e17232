#!/opt/lockstep/bin/python -I
"""The program of the image that stands in for TGI's: `text-generation-launcher`, on SageMaker and Vertex AI too.

What a platform says in variables of its own becomes flags, before those that are given; everything else reaches the
server as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

SAGEMAKER = {
    "HF_MODEL_ID": "--model-id",
    "HF_MODEL_REVISION": "--revision",
    "SM_NUM_GPUS": "--num-shard",
    "HF_MODEL_QUANTIZE": "--quantize",
    "HF_MODEL_TRUST_REMOTE_CODE": "--trust-remote-code",
}
SAGEMAKER_PORT = "8080"


def arguments(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The server's. argv: what follows the image's name; SageMaker says `serve` there."""
    is_sagemaker = argv[:1] == ["serve"] or bool(environ.get("HF_MODEL_ID"))
    given = list(argv[1:] if argv[:1] == ["serve"] else argv)
    if given and not given[0].startswith("-"):  # a command, such as `check`
        return given
    port = SAGEMAKER_PORT if is_sagemaker else environ.get("AIP_HTTP_PORT")  # the second is of Vertex AI
    flags = ["--port", port] if port else []
    for variable, flag in SAGEMAKER.items() if is_sagemaker else ():
        if value := environ.get(variable):
            flags.append(f"{flag}={value}")
    return [*flags, *given]


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-P", "-m", "launcher", *arguments(sys.argv[1:], os.environ)])
