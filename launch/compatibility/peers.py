"""Options and variables of vLLM, SGLang and llama.cpp's server that are none of ours, and what each is here.

Whoever gives one is told, and `docs/moving.md` has them as a table.
"""

from __future__ import annotations

from collections.abc import Mapping

# All spellings of an option; an option of ours, or why there is none.
OPTIONS: Mapping[str, str] = {
    "--model --model-path -m --hf-repo -hf": "--model-id",
    "--host": "--hostname",
    "--tensor-parallel-size -tp --tp --tp-size": "--num-shard",
    "--pipeline-parallel-size --pp-size": "--pipeline-parallel",
    "--data-parallel-size -dp --dp-size": "start several servers",
    "--max-model-len --context-length --ctx-size -c": "--max-total-tokens",
    "--gpu-memory-utilization --mem-fraction-static": "--cuda-memory-fraction",
    "--max-num-seqs --max-running-requests --parallel -np": "--max-batch-size",
    "--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens --batch-size -b --ubatch-size -ub": (
        "--max-batch-prefill-tokens"
    ),
    "--max-queued-requests": "--max-concurrent-requests, which counts running ones too",
    "--quantization -q": "--quantize",
    "--cache-type-k --cache-type-v -ctk -ctv": "--kv-cache-dtype",
    "--cpu-offload-gb --n-gpu-layers --gpu-layers -ngl": "--weights-on-device",
    "-t": "--threads",
    "--download-dir": "--huggingface-hub-cache",
    "--chat-template-file": "--chat-template",
    "--max-logprobs": "--max-top-n-tokens",
    "--enforce-eager --disable-cuda-graph": "--cuda-graphs 0",
    "--no-enable-prefix-caching --disable-radix-cache": "--disable-prefix-caching",
    "--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice --enable-metrics --metrics --jinja "
    "--cont-batching -cb --flash-attn -fa --enable-reasoning --enable-expert-parallel": "always on: leave it out",
    "--alias -a": "--served-model-name",
    "--tokenizer --tokenizer-path --tokenizer-mode --load-format": "it is the model's: leave it out",
    "--attention-backend --block-size --page-size --swap-space --distributed-executor-backend --schedule-policy "
    "--draft-min --draft-p-min --speculative-num-steps --speculative-eagle-topk "
    "--max-lora-rank --lora-target-modules --lora-backend --fully-sharded-loras --lora-dtype": (
        "the server chooses: leave it out"
    ),
    "--disable-log-requests": "--log-level warn",
    "--seed --random-seed --temp --n-predict -n --generation-config": "each request says it: leave it out",
    "--uvicorn-log-level": "--log-level",
    "--allowed-origins": "--cors-allow-origin",
    "--enable-lora --lora-modules --lora-paths --lora": "--lora-adapters, of NAME=FOLDER, or --adapter-dir",
    "--max-loras --max-loras-per-batch": "--max-adapters",
    "--max-cpu-loras --max-loaded-loras": "--adapter-host-memory, in GB",
    "--speculative-config -sc": "--speculative-model, --speculate and --speculative-method, for its three values",
    "--speculative-num-draft-tokens --draft-max --draft --draft-n": "--speculate",
    "--speculative-draft-model-path --model-draft -md --hf-repo-draft -hfd": "--speculative-model",
    "--speculative-algorithm": "--speculative-method",
    "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file": "a proxy in front speaks TLS",
    "--embedding --embeddings --is-embedding": "there are no embeddings",
}
# All spellings of a variable; ours.
VARIABLES: Mapping[str, str] = {
    "VLLM_API_KEY LLAMA_API_KEY": "API_KEY",
    "VLLM_LOGGING_LEVEL": "LOCKSTEP_LOG_LEVEL",
    "VLLM_CPU_KVCACHE_SPACE": "MAX_BATCH_TOTAL_TOKENS, in tokens",
    "VLLM_CPU_OMP_THREADS_BIND": "OMP_NUM_THREADS, a number",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "ALLOW_ADAPTER_CHANGES",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "ADAPTER_DIR",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "LORA_ADAPTERS",
    "VLLM_PLUGINS": "ADAPTER_DIR, for adapters",
}


def remedy(option: str) -> str | None:
    """What to do about an option of theirs; None where it is none."""
    for spellings, here in OPTIONS.items():
        if option in spellings.split():
            return f"here it is {here}" if here.startswith("--") else here
    return None


def idle(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of theirs that is set."""
    return [
        f"{name} changes nothing: here it is {here}"
        for names, here in VARIABLES.items()
        for name in names.split()
        if environ.get(name)
    ]
