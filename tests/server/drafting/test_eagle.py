"""EAGLE-3 heads of both layouts propose what a plain reference does, and change no answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from server.backends.cpu import Kernels
from server.drafting.head import HeadProposer
from server.ranks.collectives import Shard
from tests.server.checkpoints import Checkpoints
from tests.server.drafting.proposing import Reference, check_answers, check_proposals, hidden_states
from tests.server.drafting.test_medusa import beside, plain_prompts, spoil
from tests.server.driver import Repeating, load_engine
from tests.server.model.test_pipeline import pipeline
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks
from tests.server.stepping.test_drafts import SIZES

WIDTH, VOCABULARY, KNOWN = 64, 103, 50
HEADS, KV_HEADS, HEAD_DIM, MLP, EPS, THETA = 8, 4, 8, 96, 1e-5, 10000.0
LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Layout:
    """What a checkpoint is to have."""

    is_original: bool = True
    kind: str = "llama"
    known: int = KNOWN
    taps: tuple[int, ...] = ()  # as config.json names them; none: it does not
    num_taps: int = 3
    num_layers: int = 1
    own_embedding: bool = True
    own_head: bool = True
    is_biased: bool = False
    width: int = WIDTH
    switches: dict[str, bool] = field(default_factory=dict)

    @property
    def layer_name(self) -> str:
        return "midlayer" if self.is_original else "layers.0"


def config_of(layout: Layout) -> dict[str, Any]:
    layer = LAYER | {"model_type": layout.kind, "num_hidden_layers": layout.num_layers, "hidden_size": layout.width}
    taps = {"eagle_aux_hidden_state_layer_ids": list(layout.taps)} if layout.taps else {}
    sizes = {"draft_vocab_size": layout.known, "target_hidden_size": WIDTH}
    if layout.is_original:
        names = {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": THETA}
        outputs = {name: [layer - 1 for layer in layers] for name, layers in taps.items()}
        return layer | sizes | names | ({"eagle_config": outputs} if 0 not in layout.taps else taps)
    rope = {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
    known = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "embed_requires_grad": False}
    verifier = {"algorithm": "eagle3", "verifier": {"name_or_path": None}}
    of_layers = {"transformer_layer_config": layer | rope, "speculators_config": verifier}
    return known | sizes | taps | of_layers | layout.switches


def tensors_of(layout: Layout) -> dict[str, Tensor]:
    """Random ones, large enough that each of them matters."""
    generator = torch.Generator().manual_seed(5)
    width, heads, kv_heads = layout.width, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, layout.num_taps * WIDTH), "norm": (width,)}
    biased: dict[str, tuple[int, ...]] = {"fc": (width,)} if layout.is_biased else {}
    for index in range(layout.num_layers):
        name, inputs = (layout.layer_name, 2 * width) if index == 0 else (f"layers.{index}", width)
        sizes = {"q": (heads, inputs), "k": (kv_heads, inputs), "v": (kv_heads, inputs), "o": (width, heads)}
        shapes |= {f"{name}.self_attn.{role}_proj": size for role, size in sizes.items()}
        shapes |= {f"{name}.mlp.{role}_proj": (MLP, width) for role in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj": (width, MLP)}
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if index == 0 else ()))
        shapes |= {f"{name}.{norm}": (width,) for norm in norms}
        if layout.is_biased:
            biased |= {f"{name}.self_attn.{role}_proj": (len_of,) for role, (len_of, _) in sizes.items() if role != "o"}
        if layout.kind == "qwen3":
            shapes |= {f"{name}.self_attn.{norm}": (HEAD_DIM,) for norm in ("q_norm", "k_norm")}
    if layout.own_head:
        shapes["lm_head"] = (layout.known, width)
    if layout.own_embedding:
        shapes["embed_tokens"] = (VOCABULARY, width)
    if layout.switches.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}": (WIDTH,) for tap in range(layout.num_taps)}
    if layout.switches.get("norm_before_fc"):
        shapes["input_norm"] = (layout.num_taps * WIDTH,)
    found = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    found |= {f"{name}.bias": torch.randn(shape, generator=generator) for name, shape in biased.items()}
    return found | (vocabulary_of(generator) if layout.known < VOCABULARY else {})


def vocabulary_of(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randperm(VOCABULARY, generator=generator)[:KNOWN].sort().values
    knows = torch.zeros(VOCABULARY, dtype=torch.bool)
    knows[ids] = True
    return {"d2t": ids - torch.arange(KNOWN), "t2d": knows}


def save(folder: Path, layout: Layout, **changes: Tensor) -> dict[str, Tensor]:
    tensors = tensors_of(layout) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(layout)))
    save_file(tensors, folder / "model.safetensors")
    return tensors


@dataclass
class PlainHead:
    """The head in plain torch. shared: the served model's embedding and head."""

    layout: Layout
    tensors: dict[str, Tensor]
    shared: tuple[Tensor, Tensor]

    def __call__(self, read: Tensor, token_ids: Sequence[int], count: int) -> list[tuple[int, Tensor]]:
        """What is read before taps [T, n D] of all tokens but the last → what stands behind these, and its logits."""
        token_ids, inputs, proposed = list(token_ids), self.fused(read), []
        while True:
            hidden = self.hidden(token_ids[1:], inputs)
            logits = self.logits(hidden[-1])
            token_ids.append(int(self.places[int(logits.argmax())]))
            proposed.append((token_ids[-1], logits))
            if len(proposed) == count:
                return proposed
            inputs = torch.cat([inputs, hidden[-1:]])

    @property
    def places(self) -> Tensor:
        return self.tensors.get("d2t", torch.zeros(VOCABULARY, dtype=torch.int64)) + torch.arange(self.layout.known)

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(name), self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight(name), EPS)

    def fused(self, read: Tensor) -> Tensor:
        if self.layout.switches.get("norm_before_fc"):
            read = self.norm("input_norm", read)
        if self.layout.switches.get("fc_norm"):
            parts = read.chunk(self.layout.num_taps, dim=1)
            read = torch.cat([self.norm(f"fc_norm.{tap}", part) for tap, part in enumerate(parts)], dim=1)
        return self.linear("fc", read)

    def hidden(self, following: Sequence[int], x: Tensor) -> Tensor:
        embedding = self.weight("embed_tokens") if self.layout.own_embedding else self.shared[0]
        name = self.layout.layer_name
        normed = self.norm(f"{name}.hidden_norm", x)
        both = torch.cat([self.norm(f"{name}.input_layernorm", embedding[torch.tensor(following)]), normed], dim=1)
        x = normed if self.layout.switches.get("norm_before_residual") else x
        x = self.mlp(name, x + self.attended(name, both))
        for index in range(1, self.layout.num_layers):
            name = f"layers.{index}"
            x = self.mlp(name, x + self.attended(name, self.norm(f"{name}.input_layernorm", x)))
        return self.norm("norm", x) if self.layout.switches.get("norm_output") else x

    def logits(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.layout.switches.get("norm_output") else self.norm("norm", hidden)
        return normed @ (self.weight("lm_head") if self.layout.own_head else self.shared[1]).t()

    def mlp(self, name: str, x: Tensor) -> Tensor:
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = (normed @ self.weight(f"{name}.mlp.{role}_proj").t() for role in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.weight(f"{name}.mlp.down_proj").t()

    def attended(self, name: str, x: Tensor) -> Tensor:
        q, k, v = (
            self.linear(f"{name}.self_attn.{role}_proj", x).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
            for role in ("q", "k", "v")
        )
        if self.layout.kind == "qwen3":
            q, k = self.norm(f"{name}.self_attn.q_norm", q), self.norm(f"{name}.self_attn.k_norm", k)
        angles = torch.arange(len(x)).unsqueeze(1) * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (kv.repeat_interleave(HEADS // KV_HEADS, dim=0) for kv in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        return out @ self.weight(f"{name}.self_attn.o_proj").t()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def shared_of(served: Path) -> tuple[Tensor, Tensor]:
    with safe_open(served / "model.safetensors", "pt") as file:
        return file.get_tensor("model.embed_tokens.weight"), file.get_tensor("lm_head.weight")


def reference_of(served: Path, layout: Layout, tensors: dict[str, Tensor], taps: Sequence[int]) -> Reference:
    """What the head proposes behind so many known tokens of a sequence."""
    states, plain = hidden_states(served), PlainHead(layout, tensors, shared_of(served))

    def propose(token_ids: Sequence[int], known: int, count: int) -> list[tuple[int, Tensor]]:
        read = torch.cat([states(token_ids)[tap] for tap in taps], dim=1)[: known - 1]
        return plain(read, token_ids[:known], count)

    return propose


SWITCHES = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
LAYOUTS = {
    "original": Layout(taps=(1, 2), num_taps=2),
    "original-its-layers": Layout(),  # 2, 3 // 2 and 3 - 3
    "original-shared": Layout(taps=(0, 2), num_taps=2, known=VOCABULARY, own_embedding=False, own_head=False),
    "original-biased": Layout(kind="qwen2", taps=(1, 2), num_taps=2, is_biased=True),
    "original-narrow": Layout(taps=(0, 1, 2), width=32),
    "speculators": Layout(is_original=False, taps=(0, 1, 2), switches=dict.fromkeys(SWITCHES, False)),
    "speculators-normed": Layout(
        is_original=False, taps=(1, 2), num_taps=2, switches={"norm_before_residual": True, "fc_norm": True}
    ),
    "speculators-qwen3": Layout(
        is_original=False,
        kind="qwen3",
        taps=(0, 1, 2),
        num_layers=2,
        own_embedding=False,
        switches={"norm_output": True, "norm_before_fc": True},
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_heads_propose_what_a_reference_does(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, case: str
) -> None:
    served, layout = checkpoints("llama")[0], LAYOUTS[case]
    tensors = save(tmp_path, layout)
    engine = load_engine(served, kernels=kernels, speculative=beside(tmp_path, speculative_method="eagle3"), **SIZES)
    assert isinstance(engine.proposer, HeadProposer)
    propose = reference_of(served, layout, tensors, engine.proposer.taps)
    expected, drafter = check_answers(engine, make=plain_prompts, asked=1.0)
    check_proposals(expected, drafter, propose)
    assert list(layout.taps or (0, 1, 2)) == list(engine.proposer.taps)


def case(checkpoints: Checkpoints, folder: Path, name: str = "original") -> tuple[Path, Path]:
    """The served model's folder and that of a head for it."""
    save(folder, LAYOUTS[name])
    return checkpoints("llama")[0], folder


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": torch.bfloat16}, {"kv_cache": "int8"}, {"kv_cache": "fp8_e4m3"}, {"quantise": "int8"}],
    ids=str,
)
def test_answers_stay_the_same(
    checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """In steps that are not asked too, which leave gaps."""
    served, folder = case(checkpoints, tmp_path)
    check_answers(load_engine(served, kernels=kernels, speculative=beside(folder), **settings, **SIZES), asked=0.6)


def test_captured_passes(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path) -> None:
    served, folder = case(checkpoints, tmp_path)
    engine, capture = load_engine(served, kernels=kernels, speculative=beside(folder), **SIZES), Repeating()
    engine.backend.graph_capture = lambda sizes: capture  # type: ignore[method-assign]
    engine.allocate(SIZES["tokens"], SIZES["total_tokens"], sequences=8)
    assert engine.graphs is not None
    for prepare in engine.graphs.kinds[-1]:
        prepare()
    layout = LAYOUTS["original"]
    propose = reference_of(served, layout, tensors_of(layout), layout.taps)
    check_proposals(*check_answers(engine, make=plain_prompts, asked=1.0), propose)
    check_answers(engine)
    assert capture.replayed.keys() & set(range(capture.captured))


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "deepseek_v3", "bloom"])
def test_other_families_have_such_heads(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, name: str) -> None:
    """With tokens that are computed again, windows, compressed keys, and no rotations."""
    layout = Layout(is_original=False, taps=(0, 2), num_taps=2)
    tensors = save(tmp_path, layout)
    served = checkpoints(name)[0]
    engine = load_engine(served, kernels=kernels, speculative=beside(tmp_path), **SIZES)
    expected, drafter = check_answers(engine, make=plain_prompts, asked=1.0)
    states, plain = hidden_states(served), PlainHead(layout, tensors, (torch.empty(0), torch.empty(0)))

    def propose(token_ids: Sequence[int], known: int, count: int) -> list[tuple[int, Tensor]]:
        read = torch.cat([states(token_ids)[tap] for tap in layout.taps], dim=1)[: known - 1]
        return plain(read, token_ids[:known], count)

    check_proposals(expected, drafter, propose)


@pytest.mark.parametrize("name", ["original", pytest.param("speculators-qwen3", marks=pytest.mark.rest)])
def test_ranks_divide_them(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    served, folder = case(checkpoints, tmp_path / "head", name)
    model = f"{served}?{folder}"
    expected = {model: tensor_parallel.tokens(model, Shard())}
    assert [expected] * 2 == run_ranks([model], 2, tmp_path / "rendezvous")


def test_stages_are_refused(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path) -> None:
    served, folder = case(checkpoints, tmp_path)
    with pytest.raises(ValueError, match="reads layers of all pipeline stages: use --pipeline-parallel 1"):
        with pipeline(served, 2, kernels=kernels, speculative=beside(folder), **SIZES):
            pass


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 104}, "for a model with tokens: 104, and the model has 103"),
        ({"target_hidden_size": 32}, "with hidden states of so many numbers: 32, and the model has 64"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
            "before layers 2, 4, of which each must be another one from 0 to 3",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0]}},
            "before layers 1, 1, of which each must be an",
        ),
        ({"vocab_size": "x"}, "--speculative-model .*: config.json says vocab_size 'x', which must be"),
        ({"eagle_config": None}, "reads 128 numbers of each token, and 3 layers of the model have 192"),
        ({"eagle_config": [1]}, "eagle_config \\[1\\], which must be an object"),
        ({"draft_vocab_size": "50"}, "draft_vocab_size '50', which must be a whole number"),
        ({"num_hidden_layers": 2}, "has 2 layers, but only one `midlayer` is served"),
        ({"use_aux_hidden_state": False}, "reads the final hidden state alone"),
        ({"norm_before_fc": True}, "tensor input_norm.weight is missing"),
        ({"model_type": "bloom", "n_layer": 1, "n_head": 8}, "layers that are not as Llama's"),
        ({"model_type": "eagle"}, "of the kind 'eagle', which is not served"),
        ({"speculators_model_type": "dflash"}, "of the kind 'dflash', which is not served"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    served, folder = case(checkpoints, tmp_path)
    spoil(folder, **changes)
    with pytest.raises(ValueError, match=told):
        load_engine(served, speculative=beside(folder), **SIZES)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"d2t": torch.zeros(KNOWN, dtype=torch.int64) - 1}, "d2t of --speculative-model does not give each of its 50"),
        ({"d2t": -torch.arange(KNOWN)}, "d2t of --speculative-model does not give each of its 50"),
        ({"fc__bias": torch.zeros(WIDTH), "midlayer__other": torch.zeros(1)}, "does not use: midlayer.other"),
        ({"lm_head__weight": torch.zeros(KNOWN + 1, WIDTH)}, "tensor lm_head.weight .* has shape"),
        ({"fc__weight": torch.ones(())}, "reads 0 numbers of each token, and 2 layers of the model have 128"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, changes: dict[str, Tensor], told: str
) -> None:
    save(tmp_path, LAYOUTS["original"], **changes)
    with pytest.raises(ValueError, match=told):
        load_engine(checkpoints("llama")[0], speculative=beside(tmp_path), **SIZES)
