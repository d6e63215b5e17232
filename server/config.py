"""Settings of one shard, checked once.

As in the router's config, a field with `help` in its metadata is a public setting that the launcher turns into a flag
and an environment variable; the others are what the launcher tells this rank about its launch. No torch here, so that
the launcher starts at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("auto", "cuda", "cpu")
QUANTIZE = ("int8",)
ROPE_SCALINGS = ("linear", "dynamic")
ALL_REDUCES = ("auto", "nccl", "symmetric")


def parse_graph_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from `1,2,4`; none from `0`. Raises ValueError with a remedy for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 4 for part in parts):
        raise ValueError("give batch sizes from 1 to 1024, separated by commas, or 0 for none")
    sizes = sorted({int(part) for part in parts})
    if sizes == [0]:
        return ()
    if sizes[0] < 1 or sizes[-1] > 1024:
        raise ValueError("give batch sizes from 1 to 1024, separated by commas, or 0 for none")
    return tuple(sizes)


@dataclass(frozen=True)
class ShardConfig:
    """One rank's settings, frozen after start-up."""

    # What the launcher tells this rank about its launch.
    model_path: str  # local folder with config.json
    weights_path: str  # local folder with *.safetensors
    rank: int
    world_size: int
    socket_path: str  # unix socket that this rank serves on
    rendezvous: str  # init method of torch.distributed: file:///… or tcp://addr:port
    step_sockets: tuple[str, ...] = ()  # unix sockets on which ranks 1, 2 and so on take their steps from rank 0
    is_null: bool = False  # answer with fixed tokens and load nothing: server/null.py
    log_level: str = "info"  # the public setting of this name, which RouterConfig describes

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "What the model computes in.",
            "choices": DTYPES,
            "default": "the checkpoint's where the device computes it well, else the nearest that it does",
            "when": "float32 on a CPU to compare with another implementation, bfloat16 for speed.",
        },
    )
    random_weights: bool = field(
        default=False,
        metadata={
            "help": "Make up random weights of the shape that config.json describes, and read none.",
            "when": "To measure how fast a model would be before downloading it. The text is nonsense.",
        },
    )
    device: str = field(
        default="auto",
        metadata={
            "help": "Where the model runs; auto takes GPUs if there are any.",
            "choices": DEVICES,
            "when": "cpu keeps the GPUs of the machine free.",
        },
    )
    threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads that compute, in each shard.",
            "unit": "threads",
            "min": 1,
            "max": 1024,
            "environment": "OMP_NUM_THREADS",
            "default": "the cores divided by the shards; one beside a GPU or for a model below 64 MB",
            "when": "Lower it where other programs need the cores. More than there are cores makes every step slower.",
        },
    )
    quantize: str | None = field(
        default=None,
        metadata={
            "help": "Store the weights of linear layers in this format, converted while loading.",
            "choices": QUANTIZE,
            "default": "as in the checkpoint",
            "when": "int8 halves the memory of 16-bit weights; small differences in the text are to be expected.",
        },
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={
            "help": "Stretch the positions of a model with rotary embeddings, in place of what its config.json says.",
            "choices": ROPE_SCALINGS,
            "default": "the model's; linear if rope_factor is given",
            "when": "Prompts are longer than those that the model was trained on; answers get worse where it was not "
            "tuned for it.",
        },
    )
    rope_factor: float | None = field(
        default=None,
        metadata={
            "help": "By how much rope_scaling stretches; the longest sequence grows by as much.",
            "unit": "ratio",
            "min": 1.0,
            "max": 1024.0,
            "default": "1 if rope_scaling is given",
            "when": "Together with rope_scaling.",
        },
    )
    cuda_graphs: str | None = field(
        default=None,
        metadata={
            "help": "Batch sizes whose decode steps are captured as CUDA graphs, separated by commas; 0: none. Steps "
            "with up to 512 prompt tokens beside no larger batches are captured too. On a CPU each batch size is "
            "captured at its first use, and 0 turns that off.",
            "unit": "requests",
            "check": parse_graph_sizes,
            "default": "23 sizes up to 256",
            "when": "Fewer sizes leave memory for the KV cache and start sooner; a batch is filled up to the next "
            "size. 0 to find out whether a graph is at fault.",
        },
    )
    cuda_memory_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Share of each GPU's memory that Lockstep may use.",
            "unit": "ratio",
            "min": 0.05,
            "max": 1.0,
            "when": "Lower it when other programs use the same GPUs.",
        },
    )
    all_reduce: str = field(
        default="auto",
        metadata={
            "help": "How the shards on GPUs add up their parts. symmetric: small sums in one kernel that reads the "
            "memory of every GPU; nccl: all through NCCL; auto: symmetric where all GPUs can read each other's memory.",
            "choices": ALL_REDUCES,
            "when": "nccl to find out whether symmetric memory is at fault; symmetric to be told why it is not used.",
        },
    )
    disable_custom_kernels: bool = field(
        default=False,
        metadata={
            "help": "Compute everything with stock torch operators: the reference backend.",
            "when": "To find out whether a fast kernel is at fault; slower.",
        },
    )
    watermark_gamma: float = field(
        default=0.5,
        metadata={
            "help": "Share of the vocabulary that a watermark favours, for requests with `watermark`.",
            "unit": "ratio",
            "min": 0.01,
            "max": 0.99,
            "when": "Less is found in shorter texts where delta is large. Must be known to whoever detects the "
            "watermark (`lockstep watermark`).",
        },
    )
    watermark_delta: float = field(
        default=2.0,
        metadata={
            "help": "How much a watermark adds to the logits of the favoured tokens.",
            "unit": "logits",
            "min": 0.0,
            "max": 100.0,
            "when": "Higher is easier to detect and changes the text more.",
        },
    )

    @classmethod
    def load(cls, path: str | Path) -> ShardConfig:
        """Read what `save` wrote: the launcher's hand-over to one shard process."""
        values = json.loads(Path(path).read_text())
        return cls(**values | {"step_sockets": tuple(values["step_sockets"])})

    def save(self, path: str | Path) -> None:
        """Write as JSON, readable by its owner alone."""
        target = Path(path)
        target.touch(mode=0o600)
        target.write_text(json.dumps(asdict(self)))
