"""Loading a speculative model beside the one that is served, on the same ranks, device and dtype.

Left out: downloads, which are the launcher's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from server.arch import families
from server.arch.families.hf_config import MOST_SHOWN
from server.arch.spec import ArchSpec, validate
from server.checkpoint import formats
from server.checkpoint.files import read_json
from server.checkpoint.weights import Checkpoint, Weights
from server.config import ShardConfig
from server.drafting import eagle, medusa
from server.drafting.alignment import AlignedLogits
from server.drafting.draft_model import DraftModel
from server.drafting.eagle_layouts import is_eagle
from server.drafting.head import HeadProposer
from server.drafting.mtp import load_predictor
from server.drafting.served import Served
from server.model import load as model_loading
from server.model.transformer import Transformer
from server.stepping.proposals import Proposer

# By `model_type`, or by that of `speculators`, which has more.
UNSERVED = ("eagle", "medusa", "mlp_speculator", "dflash")
MOST_PROPOSALS = 16  # of what can propose any number


@dataclass(frozen=True)
class Kind:
    """Something that proposes. fits: whether a folder's config.json is of it."""

    method: str  # as --speculative-method
    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    load: Callable[[ShardConfig, Path, Mapping[str, Any], Served], Proposer]


def beside(config: ShardConfig, served: Served) -> tuple[Transformer, Proposer | None]:
    """The served model with what the settings ask for beside it; the last stage of one has that.

    Raises ValueError for a speculative model that does not go with the served one.
    """
    is_given = config.speculative_model is not None or config.speculative_method == "mtp"
    if not is_given or not served.model.stage.is_last:
        return served.model, None
    proposer = load(config, served)
    return served.model.tapped(proposer.taps) if proposer.taps else served.model, proposer


def load(config: ShardConfig, served: Served) -> Proposer:
    """The speculative model in a folder, or the layer of the served one."""
    asked = "--speculative-method is mtp" if config.speculative_model is None else "--speculative-model is given"
    spec = served.model.spec
    if spec.encoder is not None or not any(layer.attends for layer in spec.layers):
        kind = "is an encoder-decoder" if spec.encoder is not None else "has no attention"
        raise ValueError(f"{asked}, but the model {kind}: leave it out")
    if not served.model.kv_shape(served.dtype).num_layers:
        raise ValueError(
            f"{asked}, but no layer of the last of {config.num_stages} pipeline stages has attention: give fewer "
            "--pipeline-parallel, or leave it out"
        )
    if served.model.kv_placement.offloaded:
        raise ValueError(f"{asked}, but KV blocks stream: leave out one of both")
    if config.speculative_model is None:
        predictor = load_predictor(served.weights, served.model, served.backend, served.dtype, served.cache)
        return HeadProposer(predictor, MOST_PROPOSALS)
    folder = Path(config.speculative_model)
    hf_config = json.loads((folder / "config.json").read_text())
    refuse_unserved(folder, hf_config)
    found = next(kind for kind in KINDS if kind.fits(hf_config))
    if config.speculative_method not in ("auto", found.method):
        raise ValueError(
            f"--speculative-method is {config.speculative_method}, but --speculative-model is {found.name}: use auto "
            f"or {found.method}"
        )
    try:
        return found.load(config, folder, hf_config, served)
    except ValueError as error:
        raise _of_folder(folder, error) from error


def _of_folder(folder: Path, error: ValueError) -> ValueError:
    """The same sentence, which says of which model it is: the served one has a config.json too."""
    is_clear = "--speculative-model" in str(error) or str(folder) in str(error)
    return error if is_clear else ValueError(f"--speculative-model {folder}: {error}")


def refuse_unserved(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError for kinds that are known and not served, and for weights in the pickle format."""
    served = "a draft model, Medusa heads as TGI reads them, or an EAGLE-3 head"
    kind = hf_config.get("speculators_model_type") or hf_config.get("model_type")
    if kind in UNSERVED or ("speculators_model_type" in hf_config and kind != "eagle3"):
        raise ValueError(
            f"--speculative-model is of the kind {kind!r:.{MOST_SHOWN}}, which is not served: use {served}"
        )
    if not any(folder.glob("*.safetensors")):
        other = next((f" but {path.name}" for end in ("bin", "pt") for path in sorted(folder.glob(f"*.{end}"))), "")
        raise ValueError(
            f"--speculative-model has no *.safetensors{other}: take one in that format, or save its tensors in it"
        )


def _medusa(config: ShardConfig, folder: Path, hf_config: Mapping[str, Any], served: Served) -> Proposer:
    return medusa.load(folder, hf_config, served, config.speculate)


def _eagle(config: ShardConfig, folder: Path, hf_config: Mapping[str, Any], served: Served) -> Proposer:
    return HeadProposer(eagle.load(folder, hf_config, served), MOST_PROPOSALS)


def _draft_model(config: ShardConfig, folder: Path, hf_config: Mapping[str, Any], served: Served) -> DraftModel:
    shard, device = served.model.shard, served.backend.device
    family, spec = families.find(hf_config)
    _refuse_kind(spec)
    refuse_other_vocabulary(folder, Path(config.model_path), spec.vocab_size, served.model.vocab_size)
    validate(spec, shard.world_size)
    quantised = formats.choose(None, folder, hf_config, config.quantize_head)
    weights = Weights.open(
        Checkpoint(str(folder)),
        family.names,
        shard,
        served.dtype,
        device.torch_device,
        quantised.format,
        quantised.quantise,
        quantised.quantise_head,
    )
    model = model_loading.load(weights, spec, served.backend, served.cache)
    logits: Callable[[torch.Tensor], torch.Tensor] = model.logits
    if model.vocab_size != served.model.vocab_size:
        places = torch.arange(model.vocab_size, device=device.torch_device)
        logits = AlignedLogits(model.logits, served.model.vocab_range, shard, places)
    return DraftModel(model, served.dtype, logits, folder.name, MOST_PROPOSALS)


def _refuse_kind(spec: ArchSpec) -> None:
    """Raise ValueError for a draft model whose cache is no blocks alone."""
    if spec.encoder is not None or spec.recurrences:
        kind = "is an encoder-decoder" if spec.encoder is not None else "has recurrent layers"
        raise ValueError(f"--speculative-model {kind}, which no draft model may be: use another one")


def refuse_other_vocabulary(folder: Path, served: Path, size: int, served_size: int) -> None:
    """Raise ValueError where the tokenizers of two models differ, or without one of them, their tables' sizes."""
    own, other = (_tokens(path) for path in (folder, served))
    if own is None or other is None:
        if size != served_size:
            raise ValueError(
                f"--speculative-model has {size} tokens and the model {served_size}, and without a tokenizer.json in "
                "both folders nobody knows which are the same: use a draft model of the same family"
            )
        return
    different = [token for token in (*own, *other) if own.get(token) != other.get(token)]
    if different:
        raise ValueError(
            f"--speculative-model has another vocabulary than the model: {len(set(different))} tokens differ, of which "
            f"the first is {different[0]!r:.{MOST_SHOWN}}: use a draft model of the same family"
        )


def _tokens(folder: Path) -> dict[str, int] | None:
    """The ids of all tokens that a folder's tokenizer knows; None: it has no such file. Raises ValueError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    found = read_json(path, "the tokenizer")
    try:
        known = found["model"].get("vocab", {})
        tokens = {piece: id for id, (piece, _) in enumerate(known)} if isinstance(known, list) else dict(known)
        return tokens | {added["content"]: added["id"] for added in found.get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} does not list tokens as the library tokenizers does: download it again") from None


# The first that fits; what is nothing else is a draft model.
KINDS = (
    Kind("medusa", "Medusa heads", lambda config: config.get("medusa_num_heads") is not None, _medusa),
    Kind("eagle3", "an EAGLE-3 head", is_eagle, _eagle),
    Kind("draft", "a draft model", lambda config: True, _draft_model),
)
