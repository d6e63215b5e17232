"""Checks that the embedded model is whole, small and good enough to show to a person, and that its trainer runs.

What serves is the files in `server/demo/`; what made them is in `tests/embedded_model/`. That a full training makes the
same weights again is left to whoever runs it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomForCausalLM

from tests.embedded_model import corpus, train
from tests.running import ROOT

FOLDER = ROOT / "server" / "demo"
NOTES = ROOT / "tests" / "embedded_model"
SAMPLE_DOCUMENTS = 60
CHAT_QUESTION = "What does --num-shard do?"


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    return json.loads((NOTES / "EVALUATION.json").read_text())


def continuation(model: Any, tokenizer: Any, prompt: str, limit: int = 200) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def chat_prompt(tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def longest_immediate_repetition(words: list[str], most: int = 40) -> int:
    longest = 0
    for length in range(1, most + 1):
        for start in range(len(words) - 2 * length + 1):
            middle = start + length
            if words[start:middle] == words[middle : middle + length]:
                longest = max(longest, length)
    return longest


def test_weights_are_one_small_float32_file(evaluation: dict[str, Any]) -> None:
    files = sorted(path.name for path in FOLDER.glob("*.safetensors"))
    assert files == ["model.safetensors"]
    size = (FOLDER / "model.safetensors").stat().st_size
    assert size <= 16_000_000
    assert size == evaluation["model_bytes"]
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        kinds = {weights.get_slice(name).get_dtype() for name in names}
    assert kinds == {"F32"}
    assert "lm_head.weight" not in names
    assert "transformer.word_embeddings.weight" in names


def test_configuration_is_plain_bloom(model: Any) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["BloomForCausalLM"]
    assert config["model_type"] == "bloom"
    assert config["torch_dtype"] == "float32"
    assert config["seq_length"] == 2048
    assert [config["n_head"] % shards for shards in (1, 2, 4, 8)] == [0, 0, 0, 0]
    assert model.lm_head.weight is model.transformer.word_embeddings.weight
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    ids = [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert ids == [train.BOS_ID, train.EOS_ID, train.PAD_ID]


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was a fox.",
        "Grüße aus Köln: naïve café, ½ €",
        "日本語のテキスト、中文和한국어",
        "👩‍🚀🎉 مرحبا नमस्ते",
        "def f(x):\n\treturn  x   # spaces \r\n\x00\x7f",
        "  leading and trailing  ",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < train.VOCABULARY


def test_tokenizer_special_tokens(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(train.SPECIAL_TOKENS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 3)
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.model_max_length == 2048


def test_chat_template_renders_like_the_training_text(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind and clear."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hello!"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == ("<|system|>\nBe kind and clear.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHello!</s>\n")
    assert text == corpus.render_chat(messages)
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("</s>\n<|assistant|>\n")
    assert asked == corpus.render_chat(messages[:2], add_generation_prompt=True)


def test_recorded_perplexity_holds_on_a_sample(model: Any, tokenizer: Any, evaluation: dict[str, Any]) -> None:
    documents = train.held_out(evaluation["seed"], SAMPLE_DOCUMENTS)
    score = train.score_documents(model, tokenizer.backend_tokenizer, documents)
    assert score.perplexity == pytest.approx(evaluation["perplexity"], rel=0.10)


def test_training_computes_the_same_as_the_published_architecture(model: Any) -> None:
    ids = torch.randint(4, train.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        logits = train.fast_logits(model, ids, train.attention_bias(40, model.config.n_head))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_greedy_story_reads_well_and_ends(model: Any, tokenizer: Any) -> None:
    text = continuation(model, tokenizer, "Once upon a time", limit=300)
    assert text.endswith("</s>")
    story = text.removesuffix("</s>").strip()
    assert story[-1] in '.!?"'
    assert len(re.findall(r"[.!?]", story)) >= 5
    assert "\N{REPLACEMENT CHARACTER}" not in story
    assert longest_immediate_repetition(story.split()) < 8


def test_chat_answer_explains_the_flag(model: Any, tokenizer: Any) -> None:
    answer = continuation(model, tokenizer, chat_prompt(tokenizer, CHAT_QUESTION))
    assert answer.endswith("</s>")
    assert re.search(r"shard|GPU", answer)


def test_story_request_is_about_its_subject(model: Any, tokenizer: Any) -> None:
    story = continuation(model, tokenizer, chat_prompt(tokenizer, "Tell me a story about a fox."), limit=60)
    assert "fox" in story


def test_same_seed_gives_the_same_text() -> None:
    assert corpus.take(5, 50) == corpus.take(5, 50)
    assert corpus.take(5, 50) != corpus.take(6, 50)


def test_held_out_stories_are_not_in_the_training_text(evaluation: dict[str, Any]) -> None:
    trained = {document.text for document in corpus.take(evaluation["seed"], 1500)}
    stories = [d.text for d in train.held_out(evaluation["seed"]) if d.kind == "story"]
    assert len(stories) > 100
    assert not trained.intersection(stories)


def test_every_kind_of_document_appears() -> None:
    kinds = Counter(document.kind for document in corpus.take(11, 200))
    assert set(kinds) == set(corpus.KINDS)


def test_the_trainer_takes_a_step_that_changes_every_weight(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer = train.model_config()
    one_layer.n_layer = 1
    for name, less in {"BATCH_TOKENS": 512, "POOL": 32, "model_config": lambda: one_layer}.items():
        monkeypatch.setattr(train, name, less)
    trained, steps, tokens = train.train_model(tokenizer.backend_tokenizer, seed=3, steps=1, minutes=0)
    torch.manual_seed(3)
    fresh = dict(BloomForCausalLM(train.model_config()).named_parameters())
    assert 1 == steps and 0 < tokens <= train.BATCH_TOKENS
    assert [] == [name for name, weight in trained.named_parameters() if torch.equal(weight, fresh[name])]


def test_the_readme_has_the_figures_of_the_evaluation(evaluation: dict[str, Any]) -> None:
    text = " ".join((NOTES / "README.md").read_text().split())
    size, parameters, tokens = (evaluation[name] / 1e6 for name in ("model_bytes", "parameters", "training_tokens"))
    assert f"{parameters:.1f} million parameters" in text and f"{size:.1f} MB of float32 weights" in text
    assert f"{tokens:.1f} million tokens in {evaluation['training_seconds'] / 60:.0f} minutes" in text
    assert f"another seed is {evaluation['perplexity']}," in text
    assert f"--steps {evaluation['steps']} --seed {evaluation['seed']} " in text
