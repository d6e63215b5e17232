"""Trains the embedded model from nothing and writes its files and its evaluation; prints two outputs for the README.

All of them come from one seed and one number of steps, so anyone can make them again. The published run took 72
minutes on one processor core. The program leaves out everything a large run would need: no checkpoints, no data
files, no GPU. The server never imports it: what serves is the files in `server/demo/`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM, GenerationConfig

from tests.embedded_model import corpus, words

VOCABULARY = 2048
SPECIAL_TOKENS: tuple[str, ...] = ("<unk>", "<s>", "</s>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = 1, 2, 3
CONTEXT = 2048
BATCH_TOKENS = 2048
LONG_WINDOW = 512
LONG_EVERY = 6
POOL = 256
TOKENIZER_DOCUMENTS = 15_000
HELD_OUT_DOCUMENTS = 400
HELD_OUT_OFFSET = 1_000_003
MATRIX_RATE = 4e-3
OTHER_RATE = 3e-3
WARMUP_STEPS = 40
TIMED_STEPS = 30
COPY_STEPS = 120
COPY_LENGTH = 256
FACT_WEIGHT = 4.0
TRIM_SHARE = 0.15
BOS_SHARE = 0.1
IGNORED = -100
SCORE_ROWS = 8


@dataclass(frozen=True)
class Score:
    """How well a model predicts a set of documents."""

    perplexity: float
    tokens: int


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer, so that any text can be written and read back."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.text for document in corpus.take(seed, TOKENIZER_DOCUMENTS))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_config() -> BloomConfig:
    """A BLOOM small enough for a few megabytes, with heads that split 1, 2, 4 and 8 ways."""
    return BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        n_layer=4,
        n_head=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=True,
    )


def token_stream(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """The documents of a seed as tokens, each ended by the end mark and some begun with `<s>`."""
    rng = random.Random(seed + 1)
    for document in corpus.documents(seed):
        ids = [*tokenizer.encode(document.text).ids, EOS_ID]
        yield [BOS_ID, *ids] if rng.random() < BOS_SHARE else ids


def _trimmed(rng: random.Random, ids: list[int]) -> list[int]:
    """Now and then drop the beginning, so that the model meets texts it sees no start of."""
    if rng.random() < TRIM_SHARE and len(ids) > 40:
        return ids[rng.randrange(len(ids) // 2) :]
    return ids


def document_groups(stream: Iterator[list[int]], rng: random.Random) -> Iterator[list[list[int]]]:
    """Groups of documents of nearly the same length, one document for each row."""
    while True:
        pool = sorted((_trimmed(rng, next(stream)) for _ in range(POOL)), key=len)
        groups: list[list[list[int]]] = [[]]
        for ids in pool:
            if (len(groups[-1]) + 1) * len(ids) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(ids)
        rng.shuffle(groups)
        yield from groups


def long_windows(stream: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    """Windows of packed documents, each going on where the one before it was cut."""
    rest: list[int] = []
    while True:
        rows = []
        for _ in range(BATCH_TOKENS // LONG_WINDOW):
            while len(rest) < LONG_WINDOW:
                rest = [*rest, *next(stream)]
            rows.append(rest[:LONG_WINDOW])
            rest = rest[LONG_WINDOW:]
        yield rows


def with_targets(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded to one length, and the next token at each position that has one."""
    length = max(len(row) for row in rows)
    ids = [[*row, *[PAD_ID] * (length - len(row))] for row in rows]
    targets = [[*row[1:], *[IGNORED] * (length - len(row) + 1)] for row in rows]
    return torch.tensor(ids), torch.tensor(targets)


def copy_rows(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of random tokens that repeat; only the repeated part is to be predicted.

    Nothing but looking back solves them. A few such batches at the beginning teach the heads to
    copy, and without them the model takes far longer to keep the names in a story apart.
    """
    period = rng.choice((16, 32, 64))
    rows = []
    for _ in range(BATCH_TOKENS // COPY_LENGTH):
        segment = [rng.randrange(len(SPECIAL_TOKENS), VOCABULARY) for _ in range(period)]
        rows.append(segment * (COPY_LENGTH // period))
    ids, targets = with_targets(rows)
    targets[:, : period - 1] = IGNORED
    return ids, targets


def fact_weights(tokenizer: Tokenizer) -> torch.Tensor:
    """Loss weights for the words that must agree through a story: names, pronouns and things."""
    names = (
        *words.GIRL_NAMES,
        *words.BOY_NAMES,
        *words.RARE_GIRL_NAMES,
        *words.RARE_BOY_NAMES,
        *words.SHE_ANIMAL_NAMES,
        *words.HE_ANIMAL_NAMES,
    )
    pronouns = ("he", "she", "him", "her", "his", "He", "She", "His", "Her")
    nouns = [animal.noun for animal in words.ANIMALS]
    things = {word for thing in words.THINGS for word in thing.split()}
    texts = [f" {word}" for word in (*names, *pronouns, *nouns, *sorted(things))] + list(names)
    weights = torch.ones(VOCABULARY)
    for text in texts:
        weights[tokenizer.encode(text).ids] = FACT_WEIGHT
    return weights


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of ids and targets: mostly whole documents, now and then long packed windows.

    At the beginning, every second batch is only there to teach copying.
    """
    rng = random.Random(seed + 4)
    groups = document_groups(token_stream(tokenizer, seed), random.Random(seed + 2))
    packed = long_windows(token_stream(tokenizer, seed + 3))
    for number in itertools.count(1):
        if number <= COPY_STEPS and number % 2 == 0:
            yield copy_rows(rng)
            continue
        yield with_targets(next(packed if number % LONG_EVERY == 0 else groups))


def attention_bias(length: int, heads: int) -> torch.Tensor:
    """ALiBi and the causal mask as one tensor, for a number of heads that is a power of two."""
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
    positions = torch.arange(length)
    distance = positions[None, :] - positions[:, None]
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(distance > 0, -math.inf)[None]


def streams(model: BloomForCausalLM, ids: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream [R, T, D] before each layer and behind the last, with fused attention."""
    body, heads = model.transformer, model.config.n_head
    hidden = body.word_embeddings_layernorm(body.word_embeddings(ids))
    rows, length, size = hidden.shape
    blocks: Iterable[Any] = body.h
    found = [hidden]
    for block in blocks:
        attention, mlp = block.self_attention, block.mlp
        fused = attention.query_key_value(block.input_layernorm(hidden))
        query, key, value = fused.view(rows, length, heads, 3, size // heads).unbind(3)
        context = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias
        )
        hidden = hidden + attention.dense(context.transpose(1, 2).reshape(rows, length, size))
        inner = mlp.dense_h_to_4h(block.post_attention_layernorm(hidden))
        hidden = hidden + mlp.dense_4h_to_h(functional.gelu(inner, approximate="tanh"))
        found.append(hidden)
    return found


def fast_logits(model: BloomForCausalLM, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The model's own forward pass with fused attention, about a quarter faster on a CPU."""
    return model.lm_head(model.transformer.ln_f(streams(model, ids, bias)[-1]))


def rate_factor(step: int, steps: int) -> float:
    """A short warm-up, a constant half and a straight way down to almost nothing."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return min(1.0, max(0.02, 2 * (steps - step) / steps))


def make_optimizers(model: BloomForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers and AdamW for everything else.

    Muon needs about half the steps of AdamW here, and the steps are what takes the time.
    """
    names = dict(model.named_parameters())
    matrices = [w for name, w in names.items() if w.dim() == 2 and "word_embeddings" not in name]
    others = [w for name, w in names.items() if w.dim() != 2 or "word_embeddings" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_step(
    model: BloomForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, torch.Tensor],
    factor: float,
    weights: torch.Tensor | None,
) -> float:
    """One step on one batch in bfloat16 arithmetic; the weights stay in float32."""
    ids, targets = batch
    bias = attention_bias(ids.shape[1], model.config.n_head).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = fast_logits(model, ids, bias)
    loss = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), weight=weights, ignore_index=IGNORED
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train_model(
    tokenizer: Tokenizer, seed: int, steps: int | None, minutes: float
) -> tuple[BloomForCausalLM, int, int]:
    """Train for some steps, or for the minutes; give the model, the steps and the tokens."""
    torch.manual_seed(seed)
    model = BloomForCausalLM(model_config())
    model.train()
    optimizers = make_optimizers(model)
    weights = fact_weights(tokenizer)
    start = time.monotonic()
    total, tokens, average = steps or 1_000_000, 0, 0.0
    for step, batch in enumerate(batches(tokenizer, seed)):
        if step == TIMED_STEPS and steps is None:
            total = max(TIMED_STEPS, int(minutes * 60 * step / (time.monotonic() - start)))
        if step >= total:
            break
        loss = train_step(model, optimizers, batch, rate_factor(step, total), weights if 2 * step < total else None)
        tokens += int((batch[1] != IGNORED).sum())
        average = loss if step == 0 else 0.97 * average + 0.03 * loss
        if step % 50 == 0:
            seconds = time.monotonic() - start
            print(f"step {step}/{total} loss {average:.3f} after {seconds:.0f} s", flush=True)
    model.eval()
    return model, total, tokens


def score_documents(model: BloomForCausalLM, tokenizer: Tokenizer, documents: Sequence[corpus.Document]) -> Score:
    """Perplexity over documents that are each read alone, their end marks included."""
    rows = [[*tokenizer.encode(document.text).ids, EOS_ID] for document in documents]
    rows.sort(key=len)
    total, count = 0.0, 0
    for first in range(0, len(rows), SCORE_ROWS):
        ids, targets = with_targets(rows[first : first + SCORE_ROWS])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits
        total += float(
            functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED
            )
        )
        count += int((targets != IGNORED).sum())
    return Score(math.exp(total / count), count)


def held_out(seed: int, count: int = HELD_OUT_DOCUMENTS) -> list[corpus.Document]:
    """Documents of another seed. Short answers recur in every seed; stories do not."""
    return corpus.take(seed + HELD_OUT_OFFSET, count)


def evaluate(model: BloomForCausalLM, tokenizer: Tokenizer, seed: int, trained: dict[str, Any]) -> dict[str, Any]:
    """The content of EVALUATION.json."""
    documents = held_out(seed)
    whole = score_documents(model, tokenizer, documents)
    kinds = {
        kind: round(score_documents(model, tokenizer, [d for d in documents if d.kind == kind]).perplexity, 4)
        for kind in corpus.KINDS
    }
    return {
        "perplexity": round(whole.perplexity, 4),
        "perplexity_by_kind": kinds,
        "held_out_documents": len(documents),
        "held_out_tokens": whole.tokens,
        "held_out_seed": seed + HELD_OUT_OFFSET,
        "seed": seed,
        **trained,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocabulary": VOCABULARY,
    }


def generate(model: BloomForCausalLM, tokenizer: Tokenizer, prompt: str, limit: int = 250) -> str:
    """Continue a prompt greedily, until the end token or the limit."""
    prompt_ids = tokenizer.encode(prompt).ids
    ids, past = list(prompt_ids), None
    with torch.inference_mode():
        for _ in range(limit):
            fresh = torch.tensor([ids if past is None else ids[-1:]])
            output = model(fresh, past_key_values=past, use_cache=True)
            logits, past = output.logits[0, -1].float(), output.past_key_values
            token = int(logits.argmax())
            if token == EOS_ID:
                break
            ids.append(token)
    return tokenizer.decode(ids[len(prompt_ids) :])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template."""
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "padding_side": "left",
            "chat_template": corpus.CHAT_TEMPLATE,
        },
    )


def write_model(out: Path, model: BloomForCausalLM) -> None:
    """Write the weights in one file and the two configuration files."""
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(out, safe_serialization=True)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config |= {"torch_dtype": "float32", "seq_length": CONTEXT}
    _write_json(path, dict(sorted(config.items())))


def outputs(model: BloomForCausalLM, tokenizer: Tokenizer) -> str:
    """Two outputs that this very model gave, as the README has them."""
    story, question = "Once upon a time", "What does --num-shard do?"
    asked = corpus.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
    return f"{story}{generate(model, tokenizer, story)}\n\n{question}\n{generate(model, tokenizer, asked)}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of this program."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--notes", type=Path, help="folder for EVALUATION.json (default: that of --out)")
    parser.add_argument("--minutes", type=float, default=25.0, help="time when --steps is not set")
    parser.add_argument("--steps", type=int, default=None, help="exact number of training steps")
    parser.add_argument("--seed", type=int, default=7, help="seed of the text and the weights")
    parser.add_argument("--threads", type=int, default=1, help="processor threads to use")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date to record")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write and evaluate the model."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    notes = options.notes or options.out
    for folder in (options.out, notes):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(options.seed)
    write_tokenizer(options.out, tokenizer)
    start = time.monotonic()
    model, steps, tokens = train_model(tokenizer, options.seed, options.steps, options.minutes)
    seconds = round(time.monotonic() - start)
    write_model(options.out, model)
    trained = {
        "date": options.date,
        "steps": steps,
        "training_tokens": tokens,
        "training_seconds": seconds,
        "threads": options.threads,
        "model_bytes": (options.out / "model.safetensors").stat().st_size,
    }
    facts = evaluate(model, tokenizer, options.seed, trained)
    _write_json(notes / "EVALUATION.json", facts)
    print(json.dumps(facts, indent=2), outputs(model, tokenizer), sep="\n\n")


if __name__ == "__main__":
    main()
