"""Settings of one shard, checked once, and the rules between them.

As in the router's config, a field with `help` in its metadata is a public setting that the launcher turns into a flag
and an environment variable; the others are what the launcher tells this rank about its launch. No torch here, so that
the launcher starts at once, and finds what the settings break, alone and together, before it asks for a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from host import cpu_kinds
from host.folders import free_bytes, nearest_folder, open_unnamed, refuse_memory
from server.offload.share import Share

AUTO = "auto"
DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("auto", "cuda", "cpu")
QUANTIZE = (
    "awq", "gptq", "compressed-tensors", "fp8", "int8", "int4", "eetq", "bitsandbytes-nf4", "bitsandbytes-fp4",
    "bitsandbytes", "mxfp4", "quark", "torchao",
)  # fmt: skip
# What other servers know by these names: why not, and what to do instead.
QUANTIZE_REFUSED = {
    "exl2": "checkpoints of ExLlamaV2 are not served; take one of the same model in gptq or awq",
    "marlin": "weights in the order of marlin's kernels are not served; take a checkpoint in gptq or awq, which needs "
    "no other name here",
    "gguf": "GGUF files are not served; take the model's safetensors, and int4 or int8 to quantise them while loading",
}
QUANTIZE_HEADS = ("int8", "none")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8")
ROPE_SCALINGS = ("linear", "dynamic")
THROUGH_HOST = "host"
ALL_REDUCES = ("auto", "nccl", "symmetric", THROUGH_HOST)


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
    stage_sockets: tuple[str, ...] = ()  # unix socket of each pipeline stage; none where there is one stage
    num_local: int = 0  # ranks of each machine, in their order; 0: all are on this one
    # The limits that say how much of the memory the KV cache wants; 0: not known.
    max_sequences: int = 0  # at once
    max_total_tokens: int = 0
    max_batch_total_tokens: int = 0
    max_batch_prefill_tokens: int = 0
    is_null: bool = False  # answer with fixed tokens and load nothing: server/null.py
    version: str = ""  # of Lockstep: what one version keeps on disk, another does not read
    log_level: str = "info"  # the public setting of this name, which RouterConfig describes
    # Likewise; of the model's name the launcher made its folder.
    speculative_model: str | None = None  # local folder with config.json and *.safetensors
    speculative_method: str = "auto"
    speculate: int = 0  # tokens proposed for a sequence in a step, at most
    has_adapters: bool = False  # whether requests may have adapters, so that layers are loaded to be changed by them

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Data type of the computation.",
            "choices": DTYPES,
            "refused": {"auto": "leave it out, which means that"},
            "default": "the checkpoint's where the device computes it well, else the nearest that it does",
            "when": "float32 on a CPU to compare with another implementation, bfloat16 for speed.",
        },
    )
    random_weights: bool = field(
        default=False,
        metadata={
            "help": "Use random weights of the shape that config.json describes; no weights are read.",
            "when": "To measure a model's speed before downloading it. The text is nonsense.",
        },
    )
    device: str = field(
        default="auto",
        metadata={
            "help": "Device of the model; auto uses GPUs if there are any.",
            "choices": DEVICES,
            "when": "cpu keeps the machine's GPUs free.",
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
            "when": "Lower it where other programs need the cores. More threads than cores make every step slower.",
        },
    )
    quantize: str | None = field(
        default=None,
        metadata={
            "help": "Format of the linear layers' weights. int8, fp8, int4, eetq and those of bitsandbytes are made "
            "while loading; a quantised checkpoint declares its own.",
            "choices": QUANTIZE,
            "refused": QUANTIZE_REFUSED,
            "default": "as in the checkpoint",
            "when": "int8 halves the memory of 16-bit weights, int4 needs little more than a quarter; texts change "
            "slightly (docs/quantized-models.md).",
        },
    )
    quantize_head: str = field(
        default="int8",
        metadata={
            "help": "Format of the output head, and of an embedding table tied to it, with quantize int8 or int4.",
            "choices": QUANTIZE_HEADS,
            "when": "none keeps them as in the checkpoint: more memory, slightly more exact logits.",
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "Data type of the KV cache; auto: that of the computation. int8 has a scale per token and head, "
            "fp8 uses those of the checkpoint, if any.",
            "choices": KV_CACHE_DTYPES,
            "when": "int8 holds about twice the tokens of 16 bits, and texts hardly differ; fp8_e4m3 is less exact, "
            "fp8_e5m2 still less.",
        },
    )
    weights_on_device: str = field(
        default="100%",
        metadata={
            "help": "How much of the layers' weights stays on the device, as a share (40%) or a size per shard (6GB); "
            "the rest streams to it in every step. auto: as much as gives the most tokens per second, from measured "
            "speeds. Embedding and head always stay.",
            "unit": "share or size",
            "check": Share.parse,
            "words": (AUTO,),
            "when": "The model is larger than the memory: it then runs at the speed at which the rest can be read.",
        },
    )
    weights_on_host: str | None = field(
        default=None,
        metadata={
            "help": "How much of the layers' weights the host's memory holds for a GPU, as a share of all or a size "
            "per shard; the rest is read from --offload-dir.",
            "check": Share.parse,
            "default": "all that is not on the GPU",
            "when": "The host's memory is too small for the rest of the weights.",
        },
    )
    kv_on_device: str = field(
        default="100%",
        metadata={
            "help": "How much of the KV cache stays on the device, as a share (40%) or a size per shard (6GB); the "
            "other blocks are read and written in every step, layer by layer.",
            "check": Share.parse,
            "when": "More or longer sequences than memory holds; each then waits for its blocks to be read.",
        },
    )
    kv_on_host: str | None = field(
        default=None,
        metadata={
            "help": "How much of the KV cache the host's memory holds for a GPU, as a share of all or a size per "
            "shard; the rest is in --offload-dir.",
            "check": Share.parse,
            "default": "all that is not on the GPU",
            "when": "The host's memory is too small for the rest of the KV cache.",
        },
    )
    offload_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for weights and KV blocks that stream from a disk. Its files cannot be opened by other "
            "processes and are removed when the shard ends.",
            "default": "none",
            "when": "With --weights-on-device or --kv-on-device below 100%. Use the fastest disk; tmpfs is refused.",
        },
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={
            "help": "Scale the positions of a model with rotary embeddings, instead of as its config.json says.",
            "choices": ROPE_SCALINGS,
            "default": "the model's; linear if --rope-factor is given",
            "when": "Prompts are longer than in training; answers get worse unless the model was tuned for it.",
        },
    )
    rope_factor: float | None = field(
        default=None,
        metadata={
            "help": "Factor of --rope-scaling; the longest sequence grows by it.",
            "unit": "ratio",
            "min": 1.0,
            "max": 1024.0,
            "default": "1 if --rope-scaling is given",
            "when": "Together with --rope-scaling.",
        },
    )
    cuda_graphs: str | None = field(
        default=None,
        metadata={
            "help": "Batch sizes whose decode steps are captured as CUDA graphs, separated by commas; 0: none. Steps "
            "with up to 512 prompt tokens and batches of these sizes are captured too. On a CPU each batch size is "
            "captured at its first use, and 0 turns that off.",
            "unit": "requests",
            "check": parse_graph_sizes,
            "default": "31 sizes up to 512, as far as requests may run at once",
            "when": "Fewer sizes leave memory for the KV cache and start sooner; a batch is padded to the next size. "
            "0 to find out whether a graph causes a fault.",
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
            "help": "How shards on GPUs sum partial results. symmetric: small sums in one kernel that reads every "
            "GPU's memory; nccl: all through NCCL; auto: symmetric where all GPUs can read each other's memory; host: "
            "through the host's memory with gloo, which is slow but lets shards share a GPU. On CPUs auto is memory "
            "that the shards of a machine share, and everything else gloo.",
            "choices": ALL_REDUCES,
            "when": "nccl to find out whether symmetric memory causes a fault; symmetric to see why it is not used; "
            "host to try several shards on one GPU.",
        },
    )
    adapter_memory: float = field(
        default=1.0,
        metadata={
            "help": "Memory of each shard's device for adapters, where requests may name some. One that a request "
            "waits for takes the place of those used least recently.",
            "unit": "GB",
            "min": 0.001,
            "max": 100_000.0,
            "when": "More adapters are in use at once than it holds, each as much as its files in the model's "
            "dtype, or one is larger. It is taken from the KV cache.",
        },
    )
    adapter_host_memory: float = field(
        default=4.0,
        metadata={
            "help": "Host memory behind it, of each shard on a GPU: an adapter that is there is not read from the disk "
            "again. On a CPU --adapter-memory alone counts.",
            "unit": "GB",
            "min": 0.0,
            "max": 100_000.0,
            "when": "Raise it for many adapters on a slow disk; 0 to keep nothing.",
        },
    )
    max_adapters: int = field(
        default=64,
        metadata={
            "help": "Adapters that can be on a device at once, whatever they take.",
            "unit": "adapters",
            "min": 1,
            "max": 1024,
            "when": "Raise it if --adapter-memory has room for more, and requests at once name more.",
        },
    )
    prefix_cache_host_gb: float = field(
        default=0.0,
        metadata={
            "help": "Host memory for the prefix cache, over all shards: prefixes that no longer fit into the KV cache "
            "are copied back from there instead of being computed.",
            "unit": "GB",
            "min": 0.0,
            "max": 100_000.0,
            "default": "0; with --prefix-cache-disk-gb what the longest sequence takes, at most 1 GB",
            "when": "On a GPU, if requests share more long prefixes than the KV cache holds. On a CPU raise "
            "--max-batch-total-tokens instead: it is the same memory.",
        },
    )
    prefix_cache_disk_gb: float = field(
        default=0.0,
        metadata={
            "help": "Disk space for the prefix cache in --prefix-cache-dir, over all shards. It outlives the server "
            "and holds keys and values of all prompts and answers (docs/operating.md).",
            "unit": "GB",
            "min": 0.0,
            "max": 100_000.0,
            "when": "Long prefixes return after hours or restarts, and the disk is faster than computing them.",
        },
    )
    prefix_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of the prefix cache on disk, created if missing. Models can share it; each has its own "
            "files.",
            "default": "none",
            "when": "Together with --prefix-cache-disk-gb, on a local disk that only you can read.",
        },
    )
    null_step_ms: float = field(
        default=0.0,
        metadata={
            "help": "Duration of each step of the null model.",
            "unit": "milliseconds",
            "min": 0.0,
            "max": 60_000.0,
            "when": "With --model-id null: a server of known speed to check clients, load balancers and benchmarks.",
        },
    )
    null_token_us: float = field(
        default=0.0,
        metadata={
            "help": "Extra time per prompt token in a step of the null model. Above 0, the prefix cache is on.",
            "unit": "microseconds",
            "min": 0.0,
            "max": 1_000_000.0,
            "when": "With --null-step-ms, if long prompts or the prefix cache matter.",
        },
    )
    disable_custom_kernels: bool = field(
        default=False,
        metadata={
            "help": "Compute everything with stock torch operators: the reference backend.",
            "when": "To find out whether a fast kernel causes a fault; slower.",
        },
    )
    cpu_kernels: str = field(
        default=cpu_kinds.AUTO,
        metadata={
            "help": "Compiled CPU kernels. auto: all instructions of the processor; avx512, avx2: those of x86-64-v4 "
            "or x86-64-v3; dotprod, neon: those of aarch64 with integer dot products or without; none: stock torch "
            "operators, as without a compiler.",
            "choices": cpu_kinds.CHOICES,
            "check": cpu_kinds.check,
            "when": "To try a lesser processor, or to find out whether a kernel causes a fault. Each kind is compiled "
            "at its first use.",
        },
    )
    cpu_inputs: str = field(
        default=cpu_kinds.ROUNDED,
        metadata={
            "help": "On CPUs in bfloat16, inputs of layers with integer weights whose format leaves inputs "
            "unquantised (gptq, awq, int4, eetq). rounded: to 8 bits with a scale per 128; exact: unchanged.",
            "choices": cpu_kinds.INPUTS,
            "when": "exact gives more exact results, and reads weights up to ten times as slowly "
            "(docs/quantized-models.md).",
        },
    )
    watermark_gamma: float = field(
        default=0.5,
        metadata={
            "help": "Share of the vocabulary that a watermark favours, for requests with `watermark`.",
            "unit": "ratio",
            "min": 0.01,
            "max": 0.99,
            "when": "With a large delta, a lower gamma is detected in shorter texts. `lockstep watermark` needs the "
            "same value.",
        },
    )
    watermark_delta: float = field(
        default=2.0,
        metadata={
            "help": "Added to the logits of the favoured tokens.",
            "unit": "logits",
            "min": 0.0,
            "max": 100.0,
            "when": "Higher is easier to detect and changes the text more.",
        },
    )

    @property
    def num_sharing(self) -> int:
        """Ranks that share this machine."""
        return self.num_local or self.world_size

    @property
    def local_rank(self) -> int:
        """This rank among those."""
        return self.rank % self.num_sharing

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return max(1, len(self.stage_sockets))

    @property
    def stage_size(self) -> int:
        """Ranks of a stage, over which its layers are split."""
        return self.world_size // self.num_stages

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.rank // self.stage_size

    @property
    def speaker(self) -> int:
        """The rank that has the tokens: the first one of the last stage."""
        return self.world_size - self.stage_size

    @property
    def has_tiers(self) -> bool:
        """Whether the prefix cache goes on behind the device."""
        return bool(self.prefix_cache_host_gb or self.prefix_cache_disk_gb)

    @classmethod
    def load(cls, path: str | Path) -> ShardConfig:
        """Read what `save` wrote: the launcher's hand-over to one shard process."""
        values = json.loads(Path(path).read_text())
        return cls(**values | {name: tuple(values[name]) for name in ("step_sockets", "stage_sockets")})

    def save(self, path: str | Path) -> None:
        """Write as JSON, readable by its owner alone."""
        target = Path(path)
        target.touch(mode=0o600)
        target.write_text(json.dumps(asdict(self)))


NO_FOLDER = "--weights-on-device {} leaves weights to a disk: name a folder on one with --offload-dir"
NO_KV_FOLDER = "--kv-on-device {} leaves KV blocks to a disk: name a folder on one with --offload-dir"
NO_HOST = (
    "--{0}-on-host is for GPUs: a CPU's memory is the device's, of which --{0}-on-device takes a share; leave it out"
)


def tier_problems(
    *,
    prefix_cache_host_gb: float,
    prefix_cache_disk_gb: float,
    prefix_cache_dir: str | None,
    disable_prefix_caching: bool,
    kv_on_device: str,
) -> list[str]:
    """What is wrong with these settings together, each with its remedy."""
    has_tiers = bool(prefix_cache_host_gb or prefix_cache_disk_gb)
    problems = []
    if prefix_cache_disk_gb and not prefix_cache_dir:
        problems.append(
            f"--prefix-cache-disk-gb is {prefix_cache_disk_gb:g} but there is no --prefix-cache-dir: give a folder on "
            "a local disk, or leave both out"
        )
    if prefix_cache_dir and not prefix_cache_disk_gb:
        problems.append(
            f"--prefix-cache-dir is {prefix_cache_dir} but --prefix-cache-disk-gb is 0: say how much of that disk the "
            "prefix cache may take, or leave both out"
        )
    if has_tiers and not Share.parse(kv_on_device).is_all:
        problems.append(
            f"--kv-on-device {kv_on_device} has no prefix cache on host or disk: leave out "
            "--prefix-cache-host-gb and --prefix-cache-disk-gb, or keep the KV cache on the device"
        )
    if disable_prefix_caching and has_tiers:
        problems.append(
            "--disable-prefix-caching is set, so nothing could use --prefix-cache-host-gb and --prefix-cache-disk-gb: "
            "leave out either it or them"
        )
    return problems


def offload_problems(
    *,
    weights_on_device: str,
    weights_on_host: str | None,
    kv_on_device: str,
    kv_on_host: str | None,
    offload_dir: str | None,
    has_own_memory: bool,
) -> list[str]:
    """What is wrong with these settings on this machine, each with its remedy. has_own_memory: of the device."""
    problems = []
    if weights_on_device == AUTO and not Share.parse(kv_on_device).is_all:
        problems.append(
            f"--weights-on-device auto chooses beside a KV cache that is all on the device, and --kv-on-device is "
            f"{kv_on_device}: give a share of the weights, such as 40%, or leave --kv-on-device out"
        )
    for name, on_device, on_host, sentence in (
        ("weights", weights_on_device, weights_on_host, NO_FOLDER),
        ("kv", kv_on_device, kv_on_host, NO_KV_FOLDER),
    ):
        if on_host is not None and not has_own_memory:
            problems.append(NO_HOST.format(name))
        elif offload_dir is None and _needs_folder(on_device, on_host, has_own_memory=has_own_memory):
            problems.append(sentence.format(on_device))
    if offload_dir is not None:
        try:
            os.close(open_unnamed(Path(offload_dir), "--offload-dir")[0])
        except ValueError as error:
            problems.append(str(error))
    return problems


def _needs_folder(on_device: str, on_host: str | None, *, has_own_memory: bool) -> bool:
    """Whether something is surely on a disk: `auto` may find that everything stays."""
    if on_device == AUTO or Share.parse(on_device).is_all:
        return False
    return not has_own_memory or (on_host is not None and not Share.parse(on_host).is_all)


def folder_problems(prefix_cache_dir: str | None) -> list[str]:
    """What is wrong with the prefix cache's folder, which need not be there yet."""
    if prefix_cache_dir is None:
        return []
    folder = Path(prefix_cache_dir).expanduser()
    try:
        refuse_memory(nearest_folder(folder), "--prefix-cache-dir")
    except ValueError as error:
        return [str(error)]
    return []


def idle_settings(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each of these settings that changes nothing beside the others."""
    found = []
    weights, kv = values["weights_on_device"], values["kv_on_device"]
    weights_stay = weights != AUTO and Share.parse(weights).is_all
    kv_stays = Share.parse(kv).is_all
    if values["offload_dir"] is not None and weights_stay and kv_stays:
        found.append(
            "--offload-dir holds nothing: all weights and KV blocks stay on the device; say how much of them does with "
            "--weights-on-device or --kv-on-device"
        )
    for name, stays in (("weights", weights_stay), ("kv", kv_stays)):
        if values[f"{name}_on_host"] is not None and stays:
            found.append(f"--{name}-on-host changes nothing: --{name}-on-device is 100%, so nothing goes to the host")
    return found


def room_problem(prefix_cache_disk_gb: float, prefix_cache_dir: str | None) -> str | None:
    """A sentence where the disk has less room than the prefix cache may take."""
    if not prefix_cache_disk_gb or prefix_cache_dir is None:
        return None
    folder = Path(prefix_cache_dir).expanduser()
    try:
        own = sum(path.stat().st_blocks * 512 for path in folder.glob("*.blocks"))
        room = own + free_bytes(nearest_folder(folder))
    except OSError:
        return None  # the shards say what is wrong with it
    if prefix_cache_disk_gb * 1e9 <= room:
        return None
    return (
        f"--prefix-cache-disk-gb is {prefix_cache_disk_gb:g} and {prefix_cache_dir} has room for {room / 1e9:.1f} GB: "
        "the prefix cache grows until that is full; free space there, or lower it"
    )


def dtype_for(wanted: str | None, stored: str, good: Collection[str], device: str) -> tuple[str, str]:
    """What to compute in, and why: the wish, the checkpoint's dtype, or the nearest that the device does well."""
    if wanted is not None:
        return wanted, "asked for"
    if stored in good:
        return stored, "the checkpoint's"
    nearest = next(dtype for dtype in ("bfloat16", "float16", "float32") if dtype in good)
    return nearest, f"{device} does not compute the checkpoint's {stored} well"
