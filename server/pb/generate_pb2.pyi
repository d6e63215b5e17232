from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("model_type", "dtype", "dtype_reason", "device", "world_size", "vocab_size", "max_positions", "weight_bytes", "kv_bytes_per_token", "backend", "threads", "quantize", "block_size", "num_blocks", "decoder_start", "shares_prefixes", "threads_reason", "backend_reason", "kv_cache_dtype", "offloaded", "takes_drafts", "has_tiers", "most_proposals", "proposes", "adapter_rows", "adapter_bytes", "no_adapters")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_REASON_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_FIELD_NUMBER: _ClassVar[int]
    SHARES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    THREADS_REASON_FIELD_NUMBER: _ClassVar[int]
    BACKEND_REASON_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    TAKES_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    HAS_TIERS_FIELD_NUMBER: _ClassVar[int]
    MOST_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PROPOSES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ROWS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NO_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    dtype: str
    dtype_reason: str
    device: str
    world_size: int
    vocab_size: int
    max_positions: int
    weight_bytes: int
    kv_bytes_per_token: int
    backend: str
    threads: int
    quantize: str
    block_size: int
    num_blocks: int
    decoder_start: int
    shares_prefixes: bool
    threads_reason: str
    backend_reason: str
    kv_cache_dtype: str
    offloaded: str
    takes_drafts: bool
    has_tiers: bool
    most_proposals: int
    proposes: str
    adapter_rows: int
    adapter_bytes: int
    no_adapters: str
    def __init__(self, model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., dtype_reason: _Optional[str] = ..., device: _Optional[str] = ..., world_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., backend: _Optional[str] = ..., threads: _Optional[int] = ..., quantize: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., decoder_start: _Optional[int] = ..., shares_prefixes: _Optional[bool] = ..., threads_reason: _Optional[str] = ..., backend_reason: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., offloaded: _Optional[str] = ..., takes_drafts: _Optional[bool] = ..., has_tiers: _Optional[bool] = ..., most_proposals: _Optional[int] = ..., proposes: _Optional[str] = ..., adapter_rows: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., no_adapters: _Optional[str] = ...) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("max_batch_prefill_tokens", "max_total_tokens", "max_batch_total_tokens", "useful_tokens", "max_top_n_tokens", "max_sequences", "may_be_shorter")
    MAX_BATCH_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USEFUL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAY_BE_SHORTER_FIELD_NUMBER: _ClassVar[int]
    max_batch_prefill_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    useful_tokens: int
    max_top_n_tokens: int
    max_sequences: int
    may_be_shorter: bool
    def __init__(self, max_batch_prefill_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., useful_tokens: _Optional[int] = ..., max_top_n_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., may_be_shorter: _Optional[bool] = ...) -> None: ...

class WarmupReply(_message.Message):
    __slots__ = ("max_batch_total_tokens", "block_size", "num_blocks", "kv_bytes", "free_bytes", "step_bytes", "graph_bytes", "captured", "pads_chunks", "kv_offloaded", "products", "clocks", "max_total_tokens", "step_seconds", "token_seconds", "num_states", "state_bytes", "checkpoint_blocks", "window_blocks", "most_at_once", "kv_bytes_per_token")
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    PADS_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KV_OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOST_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    max_batch_total_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    free_bytes: int
    step_bytes: int
    graph_bytes: int
    captured: str
    pads_chunks: bool
    kv_offloaded: str
    products: _containers.RepeatedScalarFieldContainer[str]
    clocks: str
    max_total_tokens: int
    step_seconds: float
    token_seconds: float
    num_states: int
    state_bytes: int
    checkpoint_blocks: int
    window_blocks: int
    most_at_once: int
    kv_bytes_per_token: int
    def __init__(self, max_batch_total_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., step_bytes: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., captured: _Optional[str] = ..., pads_chunks: _Optional[bool] = ..., kv_offloaded: _Optional[str] = ..., products: _Optional[_Iterable[str]] = ..., clocks: _Optional[str] = ..., max_total_tokens: _Optional[int] = ..., step_seconds: _Optional[float] = ..., token_seconds: _Optional[float] = ..., num_states: _Optional[int] = ..., state_bytes: _Optional[int] = ..., checkpoint_blocks: _Optional[int] = ..., window_blocks: _Optional[int] = ..., most_at_once: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ...) -> None: ...

class OpenTiersRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class OpenTiersReply(_message.Message):
    __slots__ = ("num_slots", "num_places", "block_bytes", "places", "keys", "stamps", "trouble")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    num_places: int
    block_bytes: int
    places: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    stamps: _containers.RepeatedScalarFieldContainer[int]
    trouble: str
    def __init__(self, num_slots: _Optional[int] = ..., num_places: _Optional[int] = ..., block_bytes: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ..., stamps: _Optional[_Iterable[int]] = ..., trouble: _Optional[str] = ...) -> None: ...

class MoveBlocksRequest(_message.Message):
    __slots__ = ("session", "after_step", "is_fetch", "slots", "places", "keys", "stamps")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    IS_FETCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    session: int
    after_step: int
    is_fetch: bool
    slots: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    stamps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., after_step: _Optional[int] = ..., is_fetch: _Optional[bool] = ..., slots: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ..., stamps: _Optional[_Iterable[int]] = ...) -> None: ...

class MoveBlocksReply(_message.Message):
    __slots__ = ("is_moved", "damaged", "trouble", "is_full", "is_lost")
    IS_MOVED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    is_moved: _containers.RepeatedScalarFieldContainer[bool]
    damaged: int
    trouble: str
    is_full: bool
    is_lost: bool
    def __init__(self, is_moved: _Optional[_Iterable[bool]] = ..., damaged: _Optional[int] = ..., trouble: _Optional[str] = ..., is_full: _Optional[bool] = ..., is_lost: _Optional[bool] = ...) -> None: ...

class PrepareAdapterRequest(_message.Message):
    __slots__ = ("key", "folder", "kept")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    folder: str
    kept: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, key: _Optional[bytes] = ..., folder: _Optional[str] = ..., kept: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrepareAdapterReply(_message.Message):
    __slots__ = ("device_bytes", "problem", "may_pass")
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    MAY_PASS_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    problem: str
    may_pass: bool
    def __init__(self, device_bytes: _Optional[int] = ..., problem: _Optional[str] = ..., may_pass: _Optional[bool] = ...) -> None: ...

class AdapterPlace(_message.Message):
    __slots__ = ("row", "key")
    ROW_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    row: int
    key: bytes
    def __init__(self, row: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthReply(_message.Message):
    __slots__ = ("steps_received", "steps_finished", "oldest_step_ms", "collectives", "activity", "stage")
    STEPS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    steps_received: int
    steps_finished: int
    oldest_step_ms: int
    collectives: int
    activity: int
    stage: int
    def __init__(self, steps_received: _Optional[int] = ..., steps_finished: _Optional[int] = ..., oldest_step_ms: _Optional[int] = ..., collectives: _Optional[int] = ..., activity: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("start", "trace_path")
    START_FIELD_NUMBER: _ClassVar[int]
    TRACE_PATH_FIELD_NUMBER: _ClassVar[int]
    start: bool
    trace_path: str
    def __init__(self, start: _Optional[bool] = ..., trace_path: _Optional[str] = ...) -> None: ...

class ProfileReply(_message.Message):
    __slots__ = ("names", "calls", "self_ns")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    SELF_NS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    calls: _containers.RepeatedScalarFieldContainer[int]
    self_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., calls: _Optional[_Iterable[int]] = ..., self_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class StreamedRequest(_message.Message):
    __slots__ = ("forget",)
    FORGET_FIELD_NUMBER: _ClassVar[int]
    forget: bool
    def __init__(self, forget: _Optional[bool] = ...) -> None: ...

class StreamedReply(_message.Message):
    __slots__ = ("pass_bytes", "bytes", "waited_s", "read_layers", "read_began_s", "read_ended_s", "computed_layers", "computed_began_s", "computed_ended_s")
    PASS_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    READ_LAYERS_FIELD_NUMBER: _ClassVar[int]
    READ_BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    READ_ENDED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_ENDED_S_FIELD_NUMBER: _ClassVar[int]
    pass_bytes: int
    bytes: int
    waited_s: float
    read_layers: _containers.RepeatedScalarFieldContainer[int]
    read_began_s: _containers.RepeatedScalarFieldContainer[float]
    read_ended_s: _containers.RepeatedScalarFieldContainer[float]
    computed_layers: _containers.RepeatedScalarFieldContainer[int]
    computed_began_s: _containers.RepeatedScalarFieldContainer[float]
    computed_ended_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, pass_bytes: _Optional[int] = ..., bytes: _Optional[int] = ..., waited_s: _Optional[float] = ..., read_layers: _Optional[_Iterable[int]] = ..., read_began_s: _Optional[_Iterable[float]] = ..., read_ended_s: _Optional[_Iterable[float]] = ..., computed_layers: _Optional[_Iterable[int]] = ..., computed_began_s: _Optional[_Iterable[float]] = ..., computed_ended_s: _Optional[_Iterable[float]] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "watermark", "seed", "presence_penalty", "min_p", "bias_ids", "biases", "banned_word_ids", "banned_word_lengths", "min_tokens", "end_ids", "raw_logprobs", "is_constrained")
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    BANNED_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_WORD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_CONSTRAINED_FIELD_NUMBER: _ClassVar[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    watermark: bool
    seed: int
    presence_penalty: float
    min_p: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    banned_word_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_word_lengths: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    raw_logprobs: bool
    is_constrained: bool
    def __init__(self, do_sample: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., watermark: _Optional[bool] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., banned_word_ids: _Optional[_Iterable[int]] = ..., banned_word_lengths: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., end_ids: _Optional[_Iterable[int]] = ..., raw_logprobs: _Optional[bool] = ..., is_constrained: _Optional[bool] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("id", "token_ids", "computed", "blocks", "sampling", "top_n_tokens", "prompt_logprobs", "generated", "encoder_token_ids", "encoder_blocks", "lane", "adapter", "forced")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOP_N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    computed: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParameters
    top_n_tokens: int
    prompt_logprobs: bool
    generated: int
    encoder_token_ids: _containers.RepeatedScalarFieldContainer[int]
    encoder_blocks: _containers.RepeatedScalarFieldContainer[int]
    lane: int
    adapter: int
    forced: int
    def __init__(self, id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., computed: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., top_n_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., generated: _Optional[int] = ..., encoder_token_ids: _Optional[_Iterable[int]] = ..., encoder_blocks: _Optional[_Iterable[int]] = ..., lane: _Optional[int] = ..., adapter: _Optional[int] = ..., forced: _Optional[int] = ...) -> None: ...

class Extension(_message.Message):
    __slots__ = ("id", "token_ids", "position", "came")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    position: int
    came: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ..., came: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenMask(_message.Message):
    __slots__ = ("ids", "rows", "allowed", "forbidden", "bits")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    FORBIDDEN_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    allowed: TokenIds
    forbidden: TokenIds
    bits: bytes
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., allowed: _Optional[_Union[TokenIds, _Mapping]] = ..., forbidden: _Optional[_Union[TokenIds, _Mapping]] = ..., bits: _Optional[bytes] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("step", "retire", "add", "chunk_ids", "chunk_tokens", "decode", "reset", "held", "extend", "masks", "tier_session", "saved_blocks", "saved_slots", "restored_slots", "restored_blocks", "lane", "grown_ids", "grown_counts", "grown_blocks", "loaded_ids", "loaded_blocks", "kept_ids", "kept_blocks", "copied_ids", "copied_places", "copied_blocks", "loaded_places", "drafts", "proposals", "proposed_ids", "adapters")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    TIER_SESSION_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    GROWN_IDS_FIELD_NUMBER: _ClassVar[int]
    GROWN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GROWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_IDS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_PLACES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_PLACES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    retire: _containers.RepeatedScalarFieldContainer[int]
    add: _containers.RepeatedCompositeFieldContainer[NewSequence]
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode: bool
    reset: bool
    held: _containers.RepeatedScalarFieldContainer[int]
    extend: _containers.RepeatedCompositeFieldContainer[Extension]
    masks: _containers.RepeatedCompositeFieldContainer[TokenMask]
    tier_session: int
    saved_blocks: _containers.RepeatedScalarFieldContainer[int]
    saved_slots: _containers.RepeatedScalarFieldContainer[int]
    restored_slots: _containers.RepeatedScalarFieldContainer[int]
    restored_blocks: _containers.RepeatedScalarFieldContainer[int]
    lane: int
    grown_ids: _containers.RepeatedScalarFieldContainer[int]
    grown_counts: _containers.RepeatedScalarFieldContainer[int]
    grown_blocks: _containers.RepeatedScalarFieldContainer[int]
    loaded_ids: _containers.RepeatedScalarFieldContainer[int]
    loaded_blocks: _containers.RepeatedScalarFieldContainer[int]
    kept_ids: _containers.RepeatedScalarFieldContainer[int]
    kept_blocks: _containers.RepeatedScalarFieldContainer[int]
    copied_ids: _containers.RepeatedScalarFieldContainer[int]
    copied_places: _containers.RepeatedScalarFieldContainer[int]
    copied_blocks: _containers.RepeatedScalarFieldContainer[int]
    loaded_places: _containers.RepeatedScalarFieldContainer[int]
    drafts: _containers.RepeatedCompositeFieldContainer[Extension]
    proposals: int
    proposed_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterPlace]
    def __init__(self, step: _Optional[int] = ..., retire: _Optional[_Iterable[int]] = ..., add: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., chunk_ids: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[_Iterable[int]] = ..., decode: _Optional[bool] = ..., reset: _Optional[bool] = ..., held: _Optional[_Iterable[int]] = ..., extend: _Optional[_Iterable[_Union[Extension, _Mapping]]] = ..., masks: _Optional[_Iterable[_Union[TokenMask, _Mapping]]] = ..., tier_session: _Optional[int] = ..., saved_blocks: _Optional[_Iterable[int]] = ..., saved_slots: _Optional[_Iterable[int]] = ..., restored_slots: _Optional[_Iterable[int]] = ..., restored_blocks: _Optional[_Iterable[int]] = ..., lane: _Optional[int] = ..., grown_ids: _Optional[_Iterable[int]] = ..., grown_counts: _Optional[_Iterable[int]] = ..., grown_blocks: _Optional[_Iterable[int]] = ..., loaded_ids: _Optional[_Iterable[int]] = ..., loaded_blocks: _Optional[_Iterable[int]] = ..., kept_ids: _Optional[_Iterable[int]] = ..., kept_blocks: _Optional[_Iterable[int]] = ..., copied_ids: _Optional[_Iterable[int]] = ..., copied_places: _Optional[_Iterable[int]] = ..., copied_blocks: _Optional[_Iterable[int]] = ..., loaded_places: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Iterable[_Union[Extension, _Mapping]]] = ..., proposals: _Optional[int] = ..., proposed_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[AdapterPlace, _Mapping]]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("step", "ids", "token_ids", "logprobs", "top_counts", "top_ids", "top_logprobs", "prompt", "forward_ns", "error", "failed_rank", "lost_peer", "proposal_ids", "proposal_counts", "proposal_tokens", "proposal_logprobs", "propose_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILED_RANK_FIELD_NUMBER: _ClassVar[int]
    LOST_PEER_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    forward_ns: int
    error: str
    failed_rank: int
    lost_peer: bool
    proposal_ids: _containers.RepeatedScalarFieldContainer[int]
    proposal_counts: _containers.RepeatedScalarFieldContainer[int]
    proposal_tokens: _containers.RepeatedScalarFieldContainer[int]
    proposal_logprobs: _containers.RepeatedScalarFieldContainer[float]
    propose_ns: int
    def __init__(self, step: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., prompt: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., error: _Optional[str] = ..., failed_rank: _Optional[int] = ..., lost_peer: _Optional[bool] = ..., proposal_ids: _Optional[_Iterable[int]] = ..., proposal_counts: _Optional[_Iterable[int]] = ..., proposal_tokens: _Optional[_Iterable[int]] = ..., proposal_logprobs: _Optional[_Iterable[float]] = ..., propose_ns: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("id", "logprobs", "top_ids", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...
