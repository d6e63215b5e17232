"""One run from a model's folder to a folder of its quantised weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from server.arch import families
from server.backends.device import Device
from server.backends.reference import ReferenceBackend
from server.checkpoint import quantisation
from server.checkpoint.weights import FLOATS, Weights
from server.quantising.calibration import Texts
from server.quantising.edited_checkpoint import EditedCheckpoint, MadeFormat
from server.quantising.layerwise import Perplexity, Quantiser, Report
from server.quantising.layouts import config_of, scale_dtype, tensors_of
from server.quantising.output_folder import OutputFolder, output_folder
from server.quantising.plan import Plan, Site, make_plan
from server.quantising.recipe import Job, Recipe
from server.ranks.distributed import Shard


@dataclass(frozen=True)
class Outcome:
    """What came of a run. bytes: of all tensors."""

    perplexity: Perplexity
    bytes_before: int
    bytes_after: int
    format: str


def run(job: Job, device: Device, report: Report) -> Outcome:
    """Raises ValueError for a model that cannot be quantised so."""
    hf_config = json.loads((Path(job.model_path) / "config.json").read_text())
    family, spec = families.find(hf_config)
    if (stored := quantisation.choose(None, Path(job.model_path), hf_config)).name is not None:
        raise ValueError(f"the checkpoint is quantised already, as {stored.name}: give the one that it was made from")
    checkpoint = EditedCheckpoint(job.weights_path)
    dtype = next((d for d in map(checkpoint.dtype_of, checkpoint.names()) if d in FLOATS), torch.float32)
    scales = scale_dtype(job.recipe, dtype)
    made = MadeFormat(scales)
    weights = Weights.open(checkpoint, family.names, Shard(), torch.float32, device.torch_device, made)
    plan = make_plan(weights, spec, job.recipe)
    if (largest := max(map(max, (*job.calibration, *job.held_out)))) >= spec.vocab_size:
        raise ValueError(
            f"the tokenizer makes token {largest} of the text, and the model knows 0 to {spec.vocab_size - 1}: they do "
            "not belong together, fetch both again"
        )
    with output_folder(Path(job.output)) as folder:
        folder.refuse_full(_expected_bytes(checkpoint, plan, job.recipe))

        def finish(sites: Sequence[Site]) -> None:
            for name in (name for site in sites for name in site.names.values()):
                folder.add(tensors_of(name, made.weights[name], job.recipe, scales))

        backend = ReferenceBackend(device)
        quantiser = Quantiser(weights, checkpoint, made, spec, plan, backend, job.recipe, report, finish)
        perplexity = quantiser.run(Texts.of(job.calibration), Texts.of(job.held_out))
        before = _copy_dense(checkpoint, plan, folder)
        quantised = config_of(job.recipe, plan.ignore)
        files: dict[str, Path | str] = {Path(path).name: Path(path) for path in job.files}
        if job.recipe.layout == "gptq":
            files["quantize_config.json"] = json.dumps(quantised, indent=2) + "\n"  # where older readers look
        after = folder.complete(hf_config | {"quantization_config": quantised}, files)
    return Outcome(perplexity, before, after, f"{quantised['quant_method']}, {job.recipe.layout}")


def _expected_bytes(checkpoint: EditedCheckpoint, plan: Plan, recipe: Recipe) -> int:
    """Of what will be made, without the scales of groups."""
    quantised = {f"{name}.weight" for name in plan.sizes}
    dense = sum(checkpoint.bytes_of(name) for name in checkpoint.names() if name not in quantised)
    return dense + sum(outputs * inputs for outputs, inputs in plan.sizes.values()) * recipe.bits // 8


def _copy_dense(checkpoint: EditedCheckpoint, plan: Plan, folder: OutputFolder) -> int:
    """Add every tensor that is not quantised, changed or not. Returns the bytes of all tensors of the checkpoint."""
    total = 0
    quantised = {f"{name}.weight" for name in plan.sizes}
    for name in checkpoint.names():
        total += checkpoint.bytes_of(name)
        if name not in quantised:
            folder.add({name: checkpoint.whole(name)})
    return total
