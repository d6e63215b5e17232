"""What EAGLE-3 checkpoints say of their heads: those of EAGLE itself and its kin, and those of `speculators`.

The first have the fields of a Llama in config.json, beside `draft_vocab_size`, and their layer is called `midlayer`.
The others have these in `transformer_layer_config`, switches beside it, and number their layers. Of the served model,
the inputs of layers 2, the middle one and the third but last are read unless config.json names others:
`eagle_aux_hidden_state_layer_ids` at its top says whose inputs, in `eagle_config` whose outputs.

Left out: heads of other kinds that `speculators` writes, EAGLE 1 and 2, and files of the pickle format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.arch import families
from server.arch.families import llama
from server.arch.families.hf_config import FLAG, MOST_SHOWN, SIZE, WHOLES, Kind
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Residual
from server.checkpoint.weights import Checkpoint

MOST_TAPS = 64
FIELDS: Mapping[str, Kind] = {
    "draft_vocab_size": SIZE,
    "target_hidden_size": SIZE,
    "eagle_aux_hidden_state_layer_ids": WHOLES,
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state"), FLAG),
}


@dataclass(frozen=True)
class EagleSpec:
    """An EAGLE-3 head."""

    layers: ArchSpec  # the vocabulary is that of the served model
    names: NameMap
    draft_vocab_size: int  # tokens that it knows
    taps: Sequence[int] | None  # see `Proposer`; None: as EAGLE itself has them
    target_width: int  # of what is read there
    residual_is_normed: bool  # the residual stream begins behind the norm
    output_is_normed: bool  # what it goes on from is behind its last norm
    norms_all: bool  # what is read is normalised as one vector …
    norms_each: bool  # … or for each layer


def is_eagle(hf_config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of such a head."""
    if "speculators_model_type" in hf_config:
        return bool(hf_config["speculators_model_type"] == "eagle3")
    return "draft_vocab_size" in hf_config or "Eagle3" in str(hf_config.get("architectures"))


def read(hf_config: Mapping[str, Any], checkpoint: Checkpoint) -> EagleSpec:
    """What config.json says. Raises ValueError for what is not served."""
    of_eagle, of_layers = (_object(hf_config, name) for name in ("eagle_config", "transformer_layer_config"))
    own = _checked({**of_eagle, **{name: value for name, value in hf_config.items() if value is not None}})
    if not own.get("use_aux_hidden_state", True):
        raise ValueError(
            "--speculative-model reads the final hidden state alone (`use_aux_hidden_state` is false): use an EAGLE-3 "
            "head that reads those of several layers"
        )
    family, spec = families.find(_with_heads(of_layers or hf_config))
    if not _is_like_llama(family.names, spec):
        raise ValueError("--speculative-model has layers that are not as Llama's are: use another EAGLE-3 head")
    is_original = any(re.match(r"(model\.)?midlayer\.", name) for name in checkpoint.names())
    if is_original and spec.num_layers > 1:
        raise ValueError(f"--speculative-model has {spec.num_layers} layers, but only one `midlayer` is served")
    outputs = _checked(of_eagle).get("eagle_aux_hidden_state_layer_ids")
    inputs = hf_config.get("eagle_aux_hidden_state_layer_ids")
    spec = _with_biases_of(checkpoint, spec)
    first, *others = spec.layers
    return EagleSpec(
        layers=replace(spec, layers=(replace(first, num_inputs=2), *others)),
        names=_names(family.names, is_original, spec),
        draft_vocab_size=own.get("draft_vocab_size", spec.vocab_size),
        taps=inputs or ([layer + 1 for layer in outputs] if outputs else None),
        target_width=own.get("target_hidden_size", spec.hidden_size),
        residual_is_normed=own.get("norm_before_residual", False),
        output_is_normed=own.get("norm_output", False),
        norms_all=own.get("norm_before_fc", False),
        norms_each=own.get("fc_norm", False),
    )


def _with_biases_of(checkpoint: Checkpoint, spec: ArchSpec) -> ArchSpec:
    """The same with the biases that there are: in config.json many heads have taken over what the model has."""
    biased = {name.rpartition(".")[0].rpartition(".")[2] for name in checkpoint.names() if name.endswith(".bias")}
    return replace(
        spec,
        qkv_bias="q_proj" in biased,
        attention_out_bias="o_proj" in biased,
        mlp_bias="down_proj" in biased,
    )


def taps_of(given: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Layers of a model of so many whose inputs are read. Raises ValueError for those that it does not have."""
    taps = tuple(sorted(set(given or (2, num_layers // 2, num_layers - 3))))
    if taps[0] < 0 or taps[-1] > num_layers or len(taps) < len(given or ()):
        shown = ", ".join(map(str, given or taps))[:MOST_SHOWN]
        raise ValueError(
            f"--speculative-model reads the model before layers {shown}, of which each "
            f"must be another one from 0 to {num_layers}: use one that was trained for this model"
        )
    return taps


def _is_like_llama(names: NameMap, spec: ArchSpec) -> bool:
    """Whether a family's layers are wired and named so, with or without its biases, norms and experts."""
    has_names = all(
        names.roles.get(role) == name for role, name in llama.NAMES.roles.items() if role in ("q", "mlp_norm")
    )
    return has_names and spec.residual is Residual.PRE and not spec.recurrences and spec.layers[0].latent is None


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are read here. Raises ValueError for one of a wrong kind."""
    found = {name: config[name] for name in FIELDS if config.get(name) is not None}
    for name, value in found.items():
        if not FIELDS[name].fits(value):
            raise ValueError(f"config.json says {name} {value!r}, which must be {FIELDS[name].name}: download it again")
    return found


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object called so, empty where there is none. Raises ValueError for anything else."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"config.json says {name} {found!r}, which must be an object: download it again")
    return found


def _with_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A head's own table is that of the tokens that it knows, whatever config.json took over from the model."""
    return {**config, "tie_word_embeddings": False}


def _names(names: NameMap, is_original: bool, spec: ArchSpec) -> NameMap:
    """Where a checkpoint keeps the parts of a head whose layers are of a family."""
    roles = {**names.roles, "hidden_norm": "layers.{i}.hidden_norm"}
    if is_original:
        roles = {role: _in_midlayer(entry) for role, entry in roles.items()}
    kept = tuple(pattern for pattern in names.ignore if "lm_head" not in pattern)
    ignore = (*kept, r"(^|\.)t2d$", r"(^|\.)d2t$", r"^verifier_(norm|lm_head)\.weight$")
    each = {f"fuse_norm_{place}": f"fc_norm.{place}" for place in range(MOST_TAPS)}
    return replace(names, roles={**roles, "fuse": "fc", "input_norm": "input_norm", **each}, ignore=ignore)


def _in_midlayer(entry: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(entry, str):
        return re.sub(r"^layers\.\{i\}\.", "midlayer.", entry)
    return tuple(re.sub(r"^layers\.\{i\}\.", "midlayer.", name) for name in entry)
