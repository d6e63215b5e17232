"""The launcher's own settings, the groups in which all settings are documented, and what never changes here.

A field with `help` in its metadata is a public setting, as in the configs of the router and the shards. Reading flags
and the environment is the work of `settings.py`; this module only says what there is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from router.config import ADAPTER_NAME_RULE, is_adapter_name

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "server" / "demo"
NULL_MODEL = "null"  # in place of a model: shards that answer at once with fixed tokens
AUTO = "auto"
SHARD_COUNTS = (1, 2, 4, 8)  # what the head counts and widths of real models divide by
SEVERAL = re.compile(r"[\s;](?:[^/\s;]+=|[./~])")  # in a path: where another adapter begins behind no comma
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")


@dataclass(frozen=True)
class AdapterSource:
    """An adapter of the command line. given: a folder, or a repository of the Hub."""

    name: str
    given: str
    revision: str | None = None


def parse_adapters(texts: Sequence[str]) -> list[AdapterSource]:
    """What `--lora-adapters` names, as TGI's does: `ID`, `NAME=ID` and `@REVISION` behind. Raises ValueError."""
    found: dict[str, AdapterSource] = {}
    for text in texts:
        name, is_named, given = text.partition("=")
        given = given if is_named else text
        is_path, revision = given.startswith((".", "/", "~")), None
        if not is_path and "@" in given:
            given, _, revision = given.partition("@")
        name = name if is_named else Path(given).name if is_path else given
        hint = "; separate adapters by commas" if re.search(r"[\s;]", text) else ""
        if not given or revision == "" or (SEVERAL.search(given) if is_path else "=" in given):
            raise ValueError(
                f"{text!r} is neither ID nor NAME=ID, of which a repository may have @REVISION behind it{hint}"
            )
        if not is_adapter_name(name):
            raise ValueError(f"{name[:80]!r} cannot be an adapter's name: {ADAPTER_NAME_RULE}{hint}")
        if name in found:
            raise ValueError(f"two adapters are called {name}: write NAME=ID with names of their own")
        found[name] = AdapterSource(name, given, revision)
    return list(found.values())


@dataclass(frozen=True)
class LauncherConfig:
    """What the launcher itself needs to know; the other public settings belong to the router and the shards."""

    model_id: str = field(
        default=str(DEMO),
        metadata={
            "help": "Model to serve: a local folder, or a repository of the Hugging Face Hub such as "
            "`bigscience/bloomz-560m`. `null`: no model but fixed words, to measure the router alone.",
            "default": "server/demo (embedded)",
            "when": "Always, except to try Lockstep out.",
        },
    )
    revision: str | None = field(
        default=None,
        metadata={
            "help": "Branch, tag or commit of the repository.",
            "default": "main",
            "when": "A full commit serves the same bytes forever.",
        },
    )
    speculative_model: str | None = field(
        default=None,
        metadata={
            "help": "Model that proposes tokens to the served one: a folder, or a repository of the Hub, with "
            "`@REVISION` behind it if need be. A smaller model with the same vocabulary, Medusa heads, or an EAGLE-3 "
            "head of the served model.",
            "default": "none",
            "when": "There is one for your model, and its requests leave the device time. Answers stay what they are.",
        },
    )
    lora_adapters: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "LoRA adapters that requests may name: ID or NAME=ID, each a folder in PEFT's format or a "
            "repository of the Hub, with `@REVISION` behind it if need be; repeat the flag or separate by commas. "
            "Without NAME, ID is the name as it is written, of a path that begins with `/`, `.` or `~` its last part.",
            "unit": "adapters",
            "default": "none",
            "check": parse_adapters,
            "when": "One model serves several tasks, each with an adapter (docs/adapters.md).",
        },
    )
    sharded: bool | None = field(
        default=None,
        metadata={
            "help": "true: one shard per visible GPU; false: one shard, unless --num-shard says otherwise.",
            "default": "decided by --num-shard",
            "when": "--num-shard is more precise.",
        },
    )
    num_shard: int | Literal["auto"] | None = field(
        default=None,
        metadata={
            "help": "Number of processes that the model is split over. auto: one for each visible GPU, or on "
            "CPUs for each NUMA node, so that each has its memory near.",
            "unit": "shards",
            "choices": (AUTO, *SHARD_COUNTS),
            "words": (AUTO,),
            "default": "the number of visible GPUs; 1 on a CPU and for the embedded model",
            "when": "The model does not fit on one GPU, or should be faster than on one.",
        },
    )
    pipeline_parallel: int = field(
        default=1,
        metadata={
            "help": "Pipeline stages that the layers are split into, by cost. Each has --num-shard processes, so there "
            "are --num-shard times --pipeline-parallel shards.",
            "unit": "stages",
            "min": 1,
            "max": 64,
            "when": "The model needs more memory than --num-shard GPUs have, above all on several nodes: stages "
            "exchange little, while the shards of a stage sum results in every layer.",
        },
    )
    nnodes: int = field(
        default=1,
        metadata={
            "help": "Number of nodes, each with equally many shards. Start the launcher on every node with the same "
            "settings and its own --node-rank; node 0 serves. Variables of torchrun, LeaderWorkerSet and Slurm are "
            "recognised.",
            "unit": "nodes",
            "min": 1,
            "max": 64,
            "when": "A model needs more GPUs than a node has; use as many pipeline stages as nodes.",
        },
    )
    node_rank: int | None = field(
        default=None,
        metadata={
            "help": "Index of this node, from 0; node 0 has the router and shard 0.",
            "unit": "rank",
            "min": 0,
            "max": 63,
            "default": "none; what the platform says",
            "when": "With --nnodes, different on each node.",
        },
    )
    tls_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder with ca.pem, cert.pem and key.pem for mutual TLS between nodes; `lockstep tls` makes it, "
            "and every node gets a copy.",
            "default": "none",
            "when": "With --nnodes, always, except on one machine.",
        },
    )
    trust_network: bool = field(
        default=False,
        metadata={
            "help": "Allow unencrypted traffic between nodes: all of it without --tls-dir, and with --tls-dir the sums "
            "of NCCL and gloo if the shards of a stage are on several nodes.",
            "when": "The network between the nodes is private, or encrypted below (WireGuard, IPsec).",
        },
    )
    node_timeout: int = field(
        default=300,
        metadata={
            "help": "How long a node waits for the others at the start and after lost contact before it exits.",
            "unit": "seconds",
            "min": 1,
            "max": 86_400,
            "when": "Longer if nodes start one after the other, shorter if the platform restarts them all.",
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={
            "help": "Accepted for compatibility, without effect: code from a model repository is never run.",
            "when": "Never.",
        },
    )
    shard_uds_path: str | None = field(
        default=None,
        metadata={
            "help": "Path of the shards' unix sockets; `-RANK` is appended.",
            "default": "a private folder for each launch",
            "when": "Another program, such as the benchmark, talks to the shards directly.",
        },
    )
    master_addr: str = field(
        default="localhost",
        metadata={
            "help": "With several nodes, the address of node 0. On one node, the address at which the shards meet: "
            "setting it or --master-port makes them meet over TCP instead of through a private file.",
            "when": "With --nnodes; or if the file system of the temporary folder has no locks. On one node TCP "
            "listens on every network interface.",
        },
    )
    master_port: int = field(
        default=29500,
        metadata={
            "help": "TCP port at which nodes meet, the same on all; on one node see --master-addr.",
            "min": 1,
            "max": 65535,
            "when": "As for --master-addr, when the port is taken.",
        },
    )
    max_deaths: int = field(
        default=8,
        metadata={
            "help": "Deaths of shards or router within ten minutes after which the server ends instead of restarting "
            "them. Deaths after a delivered token do not count. 0: the first death ends the server.",
            "unit": "deaths",
            "min": 0,
            "when": "0 if the platform restarts the whole server.",
        },
    )
    huggingface_hub_cache: str | None = field(
        default=None,
        metadata={
            "help": "Folder for downloaded models.",
            "default": "that of the Hugging Face libraries",
            "when": "The home folder is small, or the cache is a mounted volume.",
        },
    )
    weights_cache_override: str | None = field(
        default=None,
        metadata={
            "help": "Folder whose *.safetensors replace the model's weights.",
            "default": "the model's own",
            "when": "The weights are already on a local disk.",
        },
    )
    env: bool = field(
        default=False,
        metadata={
            "help": "Print versions, cores, memory and GPUs before starting.",
            "environment": None,  # ENV=production is common in containers and means something else
            "when": "For a bug report.",
        },
    )


# Settings of an earlier release that are refused by name in this one, and what to do in their place.
KEEPS_NOTHING = "the server keeps no files and no batches; `lockstep batch --url URL` answers a file of requests"
REMOVED = dict.fromkeys(
    ("batch_dir", "batch_concurrency", "batch_max_file_bytes", "batch_max_files", "batch_max_bytes"), KEEPS_NOTHING
)
# All public settings, of the router and the shards too, in the order of --help and docs/settings.md.
GROUPS = {
    "Model": "model_id revision trust_remote_code huggingface_hub_cache weights_cache_override tokenizer_config_path "
    "chat_template tool_call_parser reasoning_parser reasoning_field rope_scaling rope_factor",
    "Sharding": "sharded num_shard pipeline_parallel micro_batches shard_uds_path max_deaths",
    "Nodes": "nnodes node_rank master_addr master_port tls_dir trust_network node_timeout",
    "Limits": "max_concurrent_requests max_queue_tokens max_input_length max_total_tokens max_batch_prefill_tokens "
    "prefill_chunk max_inter_token_ms max_batch_total_tokens max_batch_size kv_admission waiting_served_ratio "
    "speculate speculative_method speculative_model "
    "max_waiting_tokens max_best_of max_n max_stop_sequences max_top_n_tokens max_client_batch_size payload_limit "
    "disable_prefix_caching state_checkpoint_tokens "
    "prefix_cache_host_gb prefix_cache_disk_gb prefix_cache_dir enable_prefill_logprobs "
    "disable_grammar_support",
    "Adapters": "lora_adapters adapter_dir allow_adapter_changes served_model_name adapter_memory adapter_host_memory "
    "max_adapters",
    "HTTP": "hostname port api_key api_keys_file request_timeout cors_allow_origin validation_workers shutdown_delay "
    "graceful_termination_timeout continuation_key",
    "Connections": "header_timeout body_timeout keep_alive_timeout unread_timeout max_header_bytes max_header_lines "
    "max_unfinished_bytes max_unread_bytes max_discarded_bytes",
    "Engine": "dtype device threads quantize quantize_head kv_cache_dtype weights_on_device weights_on_host "
    "kv_on_device kv_on_host offload_dir random_weights cuda_memory_fraction cuda_graphs cpu_kernels cpu_inputs "
    "disable_custom_kernels all_reduce null_step_ms null_token_us watermark_gamma watermark_delta",
    "Logs": "log_level json_output otlp_endpoint otlp_service_name env",
}
