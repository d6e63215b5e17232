"""One run of `lockstep merge`, from a model's folder and an adapter's to a folder of the merged model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from server.adapters.config import OnlyMerged
from server.adapters.files import AdapterFiles
from server.arch import families
from server.checkpoint import formats
from server.checkpoint.weights import Checkpoint, Weights
from server.layers.embedding import with_own_head
from server.merge.job import Job
from server.merge.tensors import Layout, Merging
from server.quantize.command import failure
from server.quantize.output_folder import output_folder
from server.ranks.collectives import Shard

TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared")  # of models of no family
HEAD = "lm_head"


def main(path: str) -> int:
    """Do the job of a file. Returns the exit code."""
    job = Job.from_json(Path(path).read_text())
    try:
        num_bytes = run(job)
    except OnlyMerged as error:
        problem = error.by_peft
    except ValueError as error:
        problem = str(error)
    except (OSError, SafetensorError) as error:
        problem = failure(error, job.output)
    else:
        sys.stdout.write(f"{job.output}: the model with the adapter merged into it, {num_bytes / 1e6:.1f} MB\n")
        return 0
    print(f"error: {problem}", file=sys.stderr)
    return 1


def run(job: Job) -> int:
    """Returns the bytes of all tensors. Raises ValueError for what cannot be merged."""
    hf_config = json.loads((Path(job.model_path) / "config.json").read_text())
    if (stored := formats.choose(None, Path(job.model_path), hf_config)).name is not None:
        raise ValueError(
            f"the model is quantised, as {stored.name}: merge the adapter into the model that it was made from, and "
            "quantise that (`lockstep quantize`)"
        )
    with output_folder(Path(job.output)) as folder, closing(AdapterFiles(Path(job.adapter_path))) as files:
        checkpoint = Checkpoint(job.weights_path)
        merging = Merging(checkpoint, files, layout_of(checkpoint, hf_config))
        folder.refuse_full(sum(path.stat().st_size for path in checkpoint.paths()))
        for name, tensor in merging.tensors():
            folder.add({name: tensor})
        merging.finish()
        return folder.complete(_config(hf_config, merging), {Path(path).name: Path(path) for path in job.files})


def layout_of(checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> Layout:
    """Where a checkpoint has its table and its head. Raises ValueError for a family's model that it is not."""
    if not families.has(hf_config):
        stems = [name.removesuffix(".weight") for name in checkpoint.names()]
        table = next((stem for stem in stems if stem.rpartition(".")[2] in TABLES), None)
        head = next((stem for stem in stems if stem.rpartition(".")[2] == HEAD), HEAD)
        return Layout(table, head, f"{head}.weight" not in checkpoint, bool(hf_config.get("is_encoder_decoder")))
    family, spec = families.find(hf_config)
    weights = Weights.open(checkpoint, family.names, Shard(), torch.float32, torch.get_default_device())
    table, head = weights.name_of("embed"), weights.name_of("head") if weights.has("head") else HEAD
    is_tied = head == table or with_own_head(weights, spec).tied_head
    if head == table or f"{head}.weight" not in checkpoint:
        head = HEAD  # as transformers calls all that are tied
    return Layout(table, head, is_tied, spec.encoder is not None, family.names)


def _config(hf_config: Mapping[str, Any], merging: Merging) -> dict[str, Any]:
    """config.json of the merged model."""
    config = dict(hf_config)
    parts = [config]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        parts.append(config["text_config"])
    for part in parts:
        if merging.num_tokens is not None:
            part.update({key: merging.num_tokens for key in ("vocab_size", "padded_vocab_size") if key in part})
        if merging.unties and (part is config or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
    return config
