"""What hosting platforms tell a container in variables of their own, as flags: for the image, and to plan a launch.

SageMaker and Vertex AI are known. Everything else reaches the server as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.compatibility.tgi import PROGRAM

SAGEMAKER = {
    "HF_MODEL_ID": "--model-id",
    "HF_MODEL_REVISION": "--revision",
    "SM_NUM_GPUS": "--num-shard",
    "HF_MODEL_QUANTIZE": "--quantize",
    "HF_MODEL_TRUST_REMOTE_CODE": "--trust-remote-code",
}
SAGEMAKER_PORT = "8080"


def arguments(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The server's. argv: what follows the image's name; SageMaker says `serve` there. Raises ValueError."""
    is_serve = argv[:1] == ["serve"]
    is_sagemaker = is_serve or bool(environ.get("HF_MODEL_ID"))
    given = list(argv[1:] if is_serve else argv)
    if given and Path(given[0]).name == PROGRAM:  # as some write it behind the image's name
        given.pop(0)
    if given and not given[0].startswith("-"):  # a command, such as `check`
        return given
    names_model = any(environ.get(name) for name in ("HF_MODEL_ID", "MODEL_ID"))
    if (
        is_serve
        and not names_model
        and not any(word.partition("=")[0] in ("--model-id", "--model_id") for word in given)
    ):
        raise ValueError("`serve` needs a model: set HF_MODEL_ID to its name, or to the folder that it is in")
    port = SAGEMAKER_PORT if is_sagemaker else environ.get("AIP_HTTP_PORT")  # the second is of Vertex AI
    flags = ["--port", port] if port else []
    for variable, flag in SAGEMAKER.items() if is_sagemaker else ():
        if value := environ.get(variable):
            flags.append(f"{flag}={value}")
    return [*flags, *given]
