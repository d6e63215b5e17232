"""Settings of the router: every limit with its unit, default and reason, checked once.

A field with `help` in its metadata is a public setting: the launcher turns it into a flag and an environment variable
of the same name, and `docs/settings.md` is written from it. The other fields are what the launcher tells the router
about this launch. Reading flags and the environment is the launcher's work; this module only says what is valid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

UNBOUNDED_TOTAL_TOKENS = 4096  # default of a model without a longest sequence; none of them was trained on longer ones
ROOM_FOR_ANSWER = 1024  # behind a longest prompt that was given for such a model
# The names in the tables of `router/chat/formats.py`, which a test compares.
TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "llama3", "mistral", "deepseek", "deepseek_v3", "qwen3_coder", "seed", "glm", "glm47"),
    *("minimax", "kimi", "harmony", "gemma", "command", "granite", "nemotron", "hunyuan", "olmo3", "lfm2", "pythonic"),
    "json",
)
REASONING_PARSERS = (
    *("auto", "none", "think", "mistral", "seed", "thought", "granite", "gemma", "command", "answer", "response"),
    "harmony",
)
KV_ADMISSIONS = ("demand", "reserve")
FROM_TEXTS = ("ngram", "suffix")  # methods that look for what was said before
OF_A_MODEL = ("draft", "medusa", "eagle3")  # those that need a model beside the one that is served
SPECULATIVE_METHODS = ("auto", *FROM_TEXTS, *OF_A_MODEL, "mtp")
DEFAULT_GUESSES = 4  # where a speculative model proposes as many
# Of an adapter: what a path, a line of a log and a label of a metric show as it is. A repository's has a slash.
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*(/[A-Za-z0-9_][A-Za-z0-9_.:+-]*)*")
MOST_ADAPTER_NAME = 128  # characters
ORIGIN = re.compile(r"null|file://|[a-z][a-z0-9+.-]*://[^\s/?#,]+")  # of a web page, as its browser sends it
ADAPTER_NAME_RULE = "give 1 to 128 letters, digits and `_.:+-`, with a letter, digit or `_` first and behind each `/`"
LOG_LEVELS = ("debug", "info", "warn", "error")
MOST_GUESSES = 16  # of one request in a step
MOST_MICRO_BATCHES = 16  # with one more step under way than that, the shards' queues hold as many
BASE_ALIAS = "tgi"  # what clients of TGI write where OpenAI's must name a model


def own_names(model_id: str, served: Sequence[str]) -> tuple[str, ...]:
    """What the model is called where other names are adapters'; the first is what it calls itself."""
    return (*served, model_id, BASE_ALIAS)


def is_adapter_name(text: str) -> bool:
    """Whether an adapter may be called that. What is none is no name of a file that could lead anywhere, either."""
    return len(text) <= MOST_ADAPTER_NAME and ADAPTER_NAME.fullmatch(text) is not None


def check_origins(origins: Sequence[str]) -> None:
    """Raises ValueError for what no browser sends as the origin of a page."""
    if not all(origin == "*" or ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError("give * or origins as browsers send them, without a path, such as https://example.org")


@dataclass(frozen=True)
class RouterConfig:
    """One router's settings, frozen after start-up. Raises ValueError that lists every problem."""

    # What the launcher tells the router about this launch.
    model_id: str
    model_path: str  # local folder with config.json and tokenizer.json
    shard_sockets: tuple[str, ...]  # unix socket of each rank, in rank order
    revision: str | None = None
    tokenizer_path: str | None = None  # folder with tokenizer.json; None: model_path
    model_sha: str | None = None  # commit of the downloaded snapshot, if it is one
    listen_fd: int | None = None  # bound, not yet listening; the launcher holds the port beside it
    control_fd: int | None = None  # on which the launcher reports new groups of shards; None: they are not restarted
    group: int = 1  # the number of the shards' group, which is one more whenever they are started again
    is_warm: bool = False  # whether that group has served a router before this one
    is_on_loopback: bool = False  # only this machine reaches the port, and the Host of every request is checked
    sources: dict[str, str] = field(default_factory=dict)  # setting -> "flag", "environment" or "default"
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder of each that the command line names
    adapter_memory: float = 1.0  # the public settings of these names, which ShardConfig describes
    adapter_host_memory: float = 4.0

    hostname: str = field(
        default="127.0.0.1",
        metadata={
            "help": "Address to listen on. On a loopback address, the Host header of requests must name this machine "
            "(localhost, a loopback address, or this setting), which stops DNS rebinding by web pages.",
            "environment": "LOCKSTEP_HOSTNAME",  # HOSTNAME is the machine's name in shells and containers
            "when": "0.0.0.0 accepts other machines, as a container must; :: also IPv6. Set an --api-key with it.",
        },
    )
    port: int = field(
        default=3000,
        metadata={
            "help": "TCP port to listen on; 0 takes a free one and prints it.",
            "min": 0,
            "max": 65535,
            "when": "Another server has the port.",
        },
    )
    max_concurrent_requests: int = field(
        default=128,
        metadata={
            "help": "Requests in the server at once, waiting or running. More are refused with 429 `overloaded`.",
            "unit": "requests",
            "min": 1,
            "when": "Raise it if clients prefer waiting to a refusal; too high, and they wait for minutes.",
        },
    )
    max_queue_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens (prompt plus `max_new_tokens`) of all waiting requests together. A request beyond it is "
            "refused with 429 `overloaded`. Without it, only --max-concurrent-requests bounds the queue.",
            "unit": "tokens",
            "min": 1,
            "default": "no limit",
            "when": "Request lengths differ widely. Set it to this server's tokens a second times the seconds that "
            "clients will wait.",
        },
    )
    max_best_of: int = field(
        default=2,
        metadata={
            "help": "Largest `best_of`: samples drawn for one request, of which the likeliest is returned.",
            "unit": "samples",
            "min": 1,
            "when": "Each sample costs a whole generation and one place of `--max-concurrent-requests`.",
        },
    )
    max_stop_sequences: int = field(
        default=4,
        metadata={
            "help": "Largest number of stop sequences in one request.",
            "unit": "sequences",
            "min": 0,
            "when": "Raise it for prompts with many end markers; every one is searched for after each token.",
        },
    )
    max_top_n_tokens: int = field(
        default=20,
        metadata={
            "help": "Largest `top_n_tokens`, and `top_logprobs` on `/v1`: candidates reported with each token.",
            "unit": "tokens",
            "min": 0,
            "when": "Raise it for evaluation; replies grow with it.",
        },
    )
    enable_prefill_logprobs: bool = field(
        default=True,
        metadata={
            "help": "Whether requests may ask for log-probabilities of their prompt (`decoder_input_details`); "
            "otherwise they are refused.",
            "when": "false, because such requests have larger steps and are not cached as prefixes.",
        },
    )
    max_input_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt.",
            "aliases": ("max_input_tokens",),
            "unit": "tokens",
            "min": 1,
            "default": "--max-total-tokens - 1; for an encoder --max-batch-prefill-tokens if that is less",
            "when": "Lower it to refuse prompts that take longer than clients may wait for.",
        },
    )
    max_total_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Longest sequence: prompt plus generated tokens of one request.",
            "unit": "tokens",
            "min": 2,
            "default": f"the model's longest sequence ({UNBOUNDED_TOTAL_TOKENS} where it has none), or what the KV "
            "cache holds",
            "when": "Lower it to bound what one request can cost, in KV cache and in time.",
        },
    )
    waiting_served_ratio: float = field(
        default=0.0,
        metadata={
            "help": "Waiting requests join the running batch once those that fit make up this share of it.",
            "unit": "ratio",
            "min": 0.0,
            "when": "Rarely: `--prefill-chunk` already protects running streams, and a ratio keeps the batch small "
            "(docs/simulating.md).",
        },
    )
    max_batch_prefill_tokens: int = field(
        default=4096,
        metadata={
            "help": "Prompt tokens computed in one step; a longer prompt is computed in chunks of at most this size.",
            "unit": "tokens",
            "min": 1,
            "default": "4096, or a power of two that takes about a second, as measured at start",
            "when": "Lower it to shorten the pause that a long prompt causes in running streams, or to save memory.",
        },
    )
    prefill_chunk: int | Literal["auto"] = field(
        default="auto",
        metadata={
            "help": "Prompt tokens computed in a step in which other requests decode: long prompts are computed in "
            "chunks of this size. auto chooses 64 or more for each step, from measured times, so that the step takes "
            "at most twice as long as without prompts.",
            "unit": "tokens",
            "words": ("auto",),
            "min": 1,
            "when": "A number gives steps of equal length: lower for shorter pauses in running streams, higher for "
            "earlier first tokens.",
        },
    )
    max_inter_token_ms: int | None = field(
        default=None,
        metadata={
            "help": "Target for the longest time between two tokens of a stream: how long a step may take that "
            "computes prompts beside decoding requests, as far as `--prefill-chunk` auto can achieve it.",
            "unit": "milliseconds",
            "min": 1,
            "default": "twice what the step would take without prompts",
            "when": "You know the acceptable pause: more than the default gives earlier first tokens and more "
            "throughput, less gives smoother streams.",
        },
    )
    speculate: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that may be guessed ahead for each running request, and checked in one step; 0: none. "
            "Answers stay what they are. How many are guessed follows from measured times and from how often guesses "
            "were right.",
            "unit": "tokens",
            "min": 0,
            "max": MOST_GUESSES,
            "default": f"0; {DEFAULT_GUESSES}, or as many as the model proposes if fewer, with --speculative-model or "
            "--speculative-method mtp",
            "when": "Requests repeat what they read or wrote, as edits of a file, extracts and agents do, and the "
            "device is not busy with many of them.",
        },
    )
    speculative_method: str = field(
        default="auto",
        metadata={
            "help": "Where guesses come from: ngram looks for the last tokens earlier in the same request, suffix also "
            "in answers to earlier requests of the same API key. draft, medusa, eagle3: from --speculative-model "
            "alone, which must be of that kind. mtp: from layers for it in the served model. auto: suffix, and "
            "--speculative-model if there is one.",
            "choices": SPECULATIVE_METHODS,
            "when": "ngram, if answers to earlier requests say nothing of later ones, or if clients of one key must "
            "not learn others' answers by timing. mtp, if the model has such layers.",
        },
    )
    state_checkpoint_tokens: int = field(
        default=512,
        metadata={
            "unit": "tokens",
            "min": 1,
            "help": "Of a model with recurrent layers, or windowed ones with rings, how many tokens lie between two "
            "places that the prefix cache keeps, in whole KV blocks. A request goes on from the last in what it "
            "shares.",
            "when": "Lower it for many short prompts with a common beginning; raise it if what is kept, whose size the "
            "start-up table tells, pushes prefixes out of the cache.",
        },
    )
    disable_prefix_caching: bool = field(
        default=False,
        metadata={
            "help": "Compute every prompt from its start, even if the KV cache still has its prefix.",
            "when": "To measure prefill, or to stop clients from learning others' prompts by timing.",
        },
    )
    disable_grammar_support: bool = field(
        default=False,
        metadata={
            "help": "Refuse requests with a grammar, and never start the two processes that compute grammars.",
            "when": "Grammars are not needed and memory is short: each process holds a table of the whole vocabulary.",
        },
    )
    max_batch_total_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that all running requests may hold together: the size of the KV cache.",
            "unit": "tokens",
            "min": 2,
            "default": "inferred at start from free memory",
            "when": "Lower it to leave memory for other programs; a value that does not fit is refused with the one "
            "that does.",
        },
    )
    kv_admission: str = field(
        default="demand",
        metadata={
            "help": "When a request gets its KV blocks. demand: as it grows; it joins the batch once what it is "
            "expected to need fits, which is learnt from the answers of its API key and route, and where blocks run "
            "out, the youngest request of the greediest key pauses and goes on later with the same tokens. reserve: "
            "at once for its prompt and all of its `max_new_tokens`, so that nothing that runs ever pauses.",
            "choices": KV_ADMISSIONS,
            "when": "reserve, where no stream may pause and clients ask for about as many tokens as they get.",
        },
    )
    max_waiting_tokens: int = field(
        default=20,
        metadata={
            "help": "Decode steps after which a waiting request joins regardless of --waiting-served-ratio.",
            "unit": "steps",
            "min": 0,
            "when": "Lower it to bound the wait for a first token; 0 admits requests at every step.",
        },
    )
    max_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Largest number of requests that run together.",
            "unit": "requests",
            "min": 1,
            "default": "no limit",
            "when": "The time of one step matters more than throughput.",
        },
    )
    max_client_batch_size: int = field(
        default=4,
        metadata={
            "help": "Largest number of prompts in one HTTP request.",
            "unit": "prompts",
            "min": 1,
            "when": "Raise it for clients that send lists of prompts.",
        },
    )
    payload_limit: int = field(
        default=2_000_000,
        metadata={
            "help": "Largest HTTP request body; a larger one is refused with 413.",
            "unit": "bytes",
            "min": 1,
            "when": "Raise it with --max-input-length: a token is about four bytes of text.",
        },
    )
    validation_workers: int = field(
        default=2,
        metadata={
            "help": "Threads that tokenise prompts and serialise long answers.",
            "unit": "threads",
            "min": 1,
            "when": "Raise it for many long prompts a second on a machine with spare cores.",
        },
    )
    api_key: str | None = field(
        default=None,
        metadata={
            "help": "Key that clients must send as `Authorization: Bearer KEY`; without it the server is open.",
            "secret": True,
            "default": "none",
            "when": "Always on an address that others can reach; a warning says so at the start. Prefer the "
            "environment variable: flags show in `ps`.",
        },
    )
    api_keys_file: str | None = field(
        default=None,
        metadata={
            "help": "JSON or TOML file of further API keys, each with a name and limits; read again when it changes. "
            "Keys share the server fairly (docs/operating.md).",
            "default": "none",
            "when": "Several users or programs share the server.",
        },
    )
    request_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Longest time for one request, queueing included. A request that exceeds it ends with `timeout`: "
            "504, or an error event in a stream. Clients may ask for less with `x-request-timeout-ms`.",
            "unit": "seconds",
            "min": 0.001,
            "default": "no limit",
            "when": "Clients give up after a known time: their requests are then not computed further.",
        },
    )
    cors_allow_origin: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Origin whose web pages may call this server, or * for any; repeat the flag or separate by commas.",
            "default": "none",
            "check": check_origins,
            "when": "Browsers call the server directly.",
        },
    )

    # Limits of connections, in seconds and bytes.
    send_buffer_bytes: int = 256 * 1024  # of the kernel, for each connection; Linux grants the double, and 4 MB unasked
    header_timeout: float = field(
        default=10.0,
        metadata={
            "help": "How long a client may take to send its headers, from connecting or from the first byte of a "
            "later request.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Rarely: headers are a few packets.",
        },
    )
    body_timeout: float = field(
        default=30.0,
        metadata={
            "help": "How long a client may take to send a body, and how long the rest of a refused request is read "
            "and discarded so that the client can read the refusal.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Raise it with --payload-limit for clients on slow lines: 2 MB in 30 s is 70 KB/s.",
        },
    )
    keep_alive_timeout: float = field(
        default=75.0,
        metadata={
            "help": "How long a connection may wait for its next request.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Keep it above the idle limit of a proxy in front (60 s is common): the proxy then closes first.",
        },
    )
    unread_timeout: float = field(
        default=60.0,
        metadata={
            "help": "How long a byte of an answer may wait for the client to read it before the connection is reset.",
            "unit": "seconds",
            "min": 0.05,
            "when": "Lower it where many clients stall. Bytes in the kernel's buffers do not count.",
        },
    )
    max_header_bytes: int = field(
        default=32 * 1024,
        metadata={
            "help": "Largest request line, headers and trailers together; more is refused with 431.",
            "unit": "bytes",
            "min": 1024,
            "when": "A proxy in front adds large headers. Browsers and proxies stay under 16 KiB.",
        },
    )
    max_header_lines: int = field(
        default=100,
        metadata={
            "help": "Largest number of headers and trailers of one request; more are refused with 431.",
            "unit": "lines",
            "min": 1,
            "when": "A proxy in front adds very many.",
        },
    )
    max_unfinished_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "help": "Bytes of unfinished request bodies over all connections. Beyond it, the API key (or else the "
            "peer) that holds the most has one request refused with 429. Never less than --payload-limit.",
            "unit": "bytes",
            "min": 1,
            "when": "Raise it for many large prompts at once over slow lines.",
        },
    )
    max_unread_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "help": "Bytes of answers that wait in the router for clients, over all connections. Beyond it, the "
            "connection that was read longest ago is reset. A single answer may be larger.",
            "unit": "bytes",
            "min": 1,
            "when": "Raise it for many large answers at once over slow lines. Bytes in the kernel's buffers do not "
            "count.",
        },
    )
    max_discarded_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={
            "help": "Bytes of a refused request that are read and discarded so that the client can read the refusal; "
            "beyond that the connection is reset.",
            "unit": "bytes",
            "min": 0,
            "when": "Lower it where traffic is paid for.",
        },
    )

    # Chats and OpenAI's API.
    tokenizer_config_path: str | None = field(
        default=None,
        metadata={
            "help": "A tokenizer_config.json to use instead of the model's, for chat template and special tokens.",
            "default": "the model's",
            "when": "The model has none, or a wrong one.",
        },
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "File of the chat template: Jinja2, or JSON with a `chat_template`.",
            "default": "the model's",
            "when": "The model has none, or you want another format.",
        },
    )
    tool_call_parser: str = field(
        default="auto",
        metadata={
            "help": "Format of the model's tool calls (docs/apis.md). auto: recognised from its chat template.",
            "choices": TOOL_CALL_PARSERS,
            "when": "The template does not show the format, or the wrong one. none: tools are refused.",
        },
    )
    reasoning_parser: str = field(
        default="auto",
        metadata={
            "help": "Marks around the model's reasoning, which chats return as `reasoning_content`. auto: recognised "
            "from its chat template.",
            "choices": REASONING_PARSERS,
            "when": "The template does not show the marks, or the wrong ones. none: reasoning stays in the text.",
        },
    )
    reasoning_field: str = field(
        default="reasoning_content",
        metadata={
            "help": "Name of the reasoning field in chat messages; requests may use either name.",
            "choices": ("reasoning_content", "reasoning"),
            "when": "Your clients expect `reasoning`.",
        },
    )
    max_n: int = field(
        default=16,
        metadata={
            "help": "Largest `n` and `best_of` on `/v1`: answers generated for one prompt.",
            "unit": "answers",
            "min": 1,
            "when": "Each answer costs a whole generation and one place of `--max-concurrent-requests`.",
        },
    )

    # Adapters.
    adapter_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of folders, each an adapter in PEFT's format with safetensors, of the folder's name. They "
            "are looked for when a request names them, so that some may come and change while the server runs.",
            "default": "none",
            "when": "There are many adapters, or they change. Whoever may write there decides what is served.",
        },
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "What requests may call the model beside --model-id and `tgi`, where other names are adapters'; "
            "`/v1/models` shows the first. Repeat the flag or separate by commas.",
            "unit": "names",
            "default": "--model-id",
            "when": "--model-id is a path, or clients have another name. Without adapters they may use any.",
        },
    )
    allow_adapter_changes: bool = field(
        default=False,
        metadata={
            "help": "Let every client load and unload adapters with `/v1/load_lora_adapter` and "
            "`/v1/unload_lora_adapter`, from below --adapter-dir alone. Without it keys with `admin` in "
            "--api-keys-file may.",
            "when": "All clients are trusted with it.",
        },
    )

    # Logs, traces and the end of a server.
    otlp_endpoint: str | None = field(
        default=None,
        metadata={
            "help": "OpenTelemetry collector (OTLP over gRPC) that receives a trace of every request.",
            "default": "none",
            "when": "You run a collector; needs the extra `otel`.",
        },
    )
    otlp_service_name: str = field(
        default="text-generation-inference.router",
        metadata={
            "help": "Service name of the traces; the default is TGI's, for its dashboards.",
            "when": "Several servers send traces to one collector.",
        },
    )
    log_level: str = field(
        default="info",
        metadata={
            "help": "Lowest level of log records of router and shards: info has one line per request, debug also one "
            "per step. The launcher's own few lines are always written.",
            "choices": LOG_LEVELS,
            "environment": "LOCKSTEP_LOG_LEVEL",  # LOG_LEVEL is common in containers, and TGI's has a form of its own
            "when": "warn for a small log on a busy server; debug to see what each step contains.",
        },
    )
    json_output: bool = field(
        default=False,
        metadata={"help": "Write logs as JSON, one object per line.", "when": "A log collector reads them."},
    )
    continuation_key: str | None = field(
        default=None,
        metadata={
            "help": "Key with which a load balancer requests the tokens of streams, so that another server can "
            "continue those of a lost one. Clients must not know it.",
            "default": "none",
            "secret": True,
            "when": "Several servers of one model run behind a balancer that migrates streams; `deploy/ray` sets it "
            "itself.",
        },
    )
    shutdown_delay: int = field(
        default=0,
        metadata={
            "help": "How long after SIGTERM new requests are still accepted while /health already answers 503.",
            "unit": "seconds",
            "min": 0,
            "when": "Behind a load balancer: longer than it takes to notice, so that a rolling restart loses no "
            "request.",
        },
    )
    graceful_termination_timeout: int = field(
        default=90,
        metadata={
            "help": "How long running requests may go on after SIGTERM before they are ended with an error.",
            "unit": "seconds",
            "min": 0,
            "when": "Match it to the grace period of the platform that sends the signal.",
        },
    )

    # Models that are cut into pipeline stages.
    num_stages: int = 1  # what the launcher tells the router: pipeline_parallel
    micro_batches: int | None = field(
        default=None,
        metadata={
            "help": "Parts that the batch is divided into with pipeline stages, so that one stage computes one part "
            "while the next stage computes another. Every part reads all weights.",
            "unit": "parts",
            "min": 1,
            "max": MOST_MICRO_BATCHES,
            "default": "the number of stages (--pipeline-parallel)",
            "when": "Raise it if stages idle because transfers between them are slow.",
        },
    )

    @property
    def own_names(self) -> tuple[str, ...]:
        """What requests may call the model itself; the first is what answers and lists call it."""
        return own_names(self.model_id, self.served_model_name)

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return bool(self.adapters or self.adapter_dir is not None or self.allow_adapter_changes)

    @property
    def num_lanes(self) -> int:
        """Micro-batches that take turns; 1 where the model is not cut."""
        if self.num_stages == 1:
            return 1
        return self.micro_batches or min(self.num_stages, MOST_MICRO_BATCHES)

    def __post_init__(self) -> None:
        if problems := relation_problems(
            max_input_length=self.max_input_length,
            max_total_tokens=self.max_total_tokens,
            max_batch_total_tokens=self.max_batch_total_tokens,
            waiting_served_ratio=self.waiting_served_ratio,
            prefill_chunk=self.prefill_chunk,
            max_inter_token_ms=self.max_inter_token_ms,
        ) + adapter_problems(adapter_dir=self.adapter_dir, allow_adapter_changes=self.allow_adapter_changes):
            raise ValueError("; ".join(problems))

    @classmethod
    def load(cls, path: str | Path) -> RouterConfig:
        """Read what `to_json` made: the launcher's hand-over to the router process."""
        values = json.loads(Path(path).read_text())
        for name in ("shard_sockets", "cors_allow_origin", "served_model_name"):
            values[name] = tuple(values[name])
        values["adapters"] = tuple((name, folder) for name, folder in values["adapters"])
        return cls(**values)

    def to_json(self) -> str:
        """As JSON. It holds the API key: a file of it has no name, or is readable by its owner alone (`save`)."""
        return json.dumps(asdict(self))

    def save(self, path: str | Path) -> None:
        """Write as JSON, readable by its owner alone."""
        target = Path(path)
        target.touch(mode=0o600)
        target.write_text(self.to_json())


def speculative_problems(*, speculative_model: str | None, speculative_method: str, speculate: int | None) -> list[str]:
    """What is wrong with these settings together, each with its remedy."""
    is_given = speculative_model is not None
    if speculative_method in OF_A_MODEL and not is_given:
        return [
            f"--speculative-method is {speculative_method} but there is no --speculative-model: name the model that "
            "proposes tokens, or leave --speculative-method out"
        ]
    if speculative_method in (*FROM_TEXTS, "mtp") and is_given:
        source = "layers of the served model" if speculative_method == "mtp" else "texts alone"
        return [
            f"--speculative-model is {speculative_model} but --speculative-method is {speculative_method}, whose "
            f"guesses come from {source}: leave one of them out"
        ]
    if speculate == 0 and (is_given or speculative_method == "mtp"):
        what = "--speculative-model" if is_given else "--speculative-method mtp"
        return [f"--speculate is 0, so nothing could use {what}: raise it, or leave one of them out"]
    return []


def most_adapter_bytes(adapter_memory: float, num_shards: int) -> int:
    """Of the files of one adapter: float32 becomes 16 bits, and shards have a part each."""
    return int(2 * adapter_memory * 1e9 * num_shards)


def adapter_problems(*, adapter_dir: str | None, allow_adapter_changes: bool) -> list[str]:
    """What is wrong with these settings together, with its remedy."""
    if allow_adapter_changes and adapter_dir is None:
        return [
            "--allow-adapter-changes is set but there is no --adapter-dir, below which all must lie that is loaded: "
            "give the folder, or leave --allow-adapter-changes out"
        ]
    return []


def relation_problems(
    *,
    max_input_length: int | None,
    max_total_tokens: int | None,
    max_batch_total_tokens: int | None,
    waiting_served_ratio: float,
    prefill_chunk: int | Literal["auto"] = "auto",
    max_inter_token_ms: int | None = None,
) -> list[str]:
    """Every rule between settings that the given values break, each with value, bound and remedy."""
    problems = []
    if not math.isfinite(waiting_served_ratio):
        problems.append(f"--waiting-served-ratio is {waiting_served_ratio}: give a finite ratio such as 0.3")
    if max_inter_token_ms is not None and prefill_chunk != "auto":
        problems.append(
            f"--max-inter-token-ms is {max_inter_token_ms} but --prefill-chunk is {prefill_chunk}, a fixed size, and "
            "only one that is chosen can keep to it: leave one of them out, or set --prefill-chunk to auto"
        )
    if max_input_length is not None and max_total_tokens is not None and max_input_length >= max_total_tokens:
        problems.append(
            f"--max-input-length is {max_input_length} but must be less than --max-total-tokens, {max_total_tokens}: "
            "lower the first or raise the second, so that at least one token can be generated"
        )
    for name, value in (("--max-total-tokens", max_total_tokens), ("--max-input-length", max_input_length)):
        if value is not None and max_batch_total_tokens is not None and value > max_batch_total_tokens:
            problems.append(
                f"{name} is {value} but --max-batch-total-tokens is {max_batch_total_tokens}, so the longest request "
                "could never run: lower the first or raise the second"
            )
    return problems
