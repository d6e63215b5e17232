"""Trains a speculative model of the embedded one, writes its folder, and says how far its guesses are right.

Everything comes from a seed and a number of steps. Left out: sampled texts, which the engine judges
(`tests/server/drafting/acceptance.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.embedded_model import train
from tests.embedded_model.speculative.draft import Draft
from tests.embedded_model.speculative.eagle import Eagle
from tests.embedded_model.speculative.medusa import Medusa
from tests.embedded_model.speculative.target import Seen, Student, Target, accepted

KINDS: dict[str, Callable[[Target], Any]] = {kind.name: kind for kind in (Draft, Eagle, Medusa)}
FILES = {"medusa": "medusa_lm_head.safetensors"}  # the others: model.safetensors
FOLDER = Path(__file__).parents[1]  # with those that are shipped
TEXTS = 3  # those of the students are other ones than the model's
DOCUMENTS, PROMPT, ANSWER, GUESSES = 30, 24, 96, 4
TOLD_EVERY = 50


def optimizers_of(student: Student) -> list[torch.optim.Optimizer]:
    """As the model's own: Muon for the matrices of layers, AdamW for everything else."""
    is_matrix = {
        name: weight.dim() == 2 and "embed" not in name and "lm_head" not in name
        for name, weight in student.trained.items()
    }
    matrices = [weight for name, weight in student.trained.items() if is_matrix[name]]
    others = [weight for name, weight in student.trained.items() if not is_matrix[name]]
    return [
        torch.optim.Muon(matrices, lr=train.MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=train.OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def take_step(student: Student, optimizers: Sequence[torch.optim.Optimizer], seen: Seen, factor: float) -> float:
    """One step on one batch; the loss."""
    loss = student.loss(seen)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(list(student.trained.values()), 1.0)
    for optimizer, rate in zip(optimizers, (train.MATRIX_RATE, train.OTHER_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * student.haste * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def teach(students: Sequence[Student], target: Target, seed: int, steps: int) -> int:
    """Train for so many steps on the same texts; the tokens of all of them."""
    optimizers = [optimizers_of(student) for student in students]
    losses, tokens, start = [0.0] * len(students), 0, time.monotonic()
    for step, (ids, targets) in enumerate(islice(target.texts(seed + TEXTS), steps)):
        unseen = Seen(ids, targets, [], None)
        is_alone = [step < student.alone * steps for student in students]
        seen = unseen if all(is_alone) else target.sees(ids, targets)
        for i, student in enumerate(students):
            what = unseen if is_alone[i] else seen
            loss = take_step(student, optimizers[i], what, train.rate_factor(step, steps))
            losses[i] = loss if step == 0 else 0.97 * losses[i] + 0.03 * loss
        tokens += int((targets != train.IGNORED).sum())
        if step % TOLD_EVERY == 0:
            told = " ".join(f"{loss:.3f}" for loss in losses)
            print(f"step {step}/{steps} loss {told} after {time.monotonic() - start:.0f} s", flush=True)
    return tokens


@torch.inference_mode()
def answers(target: Target, seed: int, count: int) -> list[tuple[list[int], int]]:
    """Beginnings of held-out documents, each with what the model goes on with, greedily; and the beginning's tokens."""
    found = []
    for document in train.held_out(seed, count):
        ids = target.tokenizer.encode(document.text).ids
        ids = ids[: min(PROMPT, len(ids) // 2)]
        whole = target.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=ANSWER)
        found.append((whole[0].tolist(), len(ids)))
    return found


def accepted_length(student: Student, target: Target, texts: Sequence[tuple[list[int], int]]) -> float:
    """Tokens of a verification, on the average of all."""
    counts: list[int] = []
    for text, start in texts:
        counts += accepted(text, start, student, target.sees(*train.with_targets([text])), GUESSES)
    return sum(counts) / len(counts)


def write(folder: Path, student: Student) -> None:
    """Write config.json and the weights, in bfloat16, as which they are evaluated."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(student.config(), indent=2, sort_keys=True) + "\n")
    save_file(published(student), folder / FILES.get(student.name, "model.safetensors"), {"format": "pt"})


def published(student: Student) -> dict[str, Tensor]:
    """What is written of a student, by name."""
    tensors = student.tensors().items()
    return {name: (t.bfloat16() if t.is_floating_point() else t).contiguous() for name, t in tensors}


def read(folder: Path, student: Student) -> None:
    """Make it what was written."""
    found = load_file(folder / FILES.get(student.name, "model.safetensors"))
    for name, tensor in student.tensors().items():
        tensor.copy_(found[name])


def rounded(student: Student) -> None:
    """Make its weights those that bfloat16 holds."""
    for weight in student.trained.values():
        weight.data.copy_(weight.data.bfloat16())


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of this program."""
    parser = argparse.ArgumentParser(description="Train speculative models of the embedded one.")
    parser.add_argument("kinds", nargs="+", choices=sorted(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="folder for their folders and for SPECULATIVE.json")
    parser.add_argument("--steps", type=int, required=True, help="number of training steps")
    parser.add_argument("--seed", type=int, default=7, help="seed of the texts and the weights")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write and evaluate them."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    target = Target()
    students = [made(kind, target, options.seed) for kind in options.kinds]
    start = time.process_time()
    tokens = teach(students, target, options.seed, options.steps)
    trained = {
        "steps": options.steps,
        "seed": options.seed,
        "training_tokens": tokens,
        "training_seconds": round(time.process_time() - start),
    }
    texts = answers(target, options.seed, DOCUMENTS)
    for student in students:
        rounded(student)
        write(options.out / student.name, student)
        facts = {
            "bytes": sum(tensor.nbytes for tensor in published(student).values()),
            "accepted_length": round(accepted_length(student, target, texts), 3),
        }
        note(options.out / "SPECULATIVE.json", student.name, trained | facts)


def made(kind: str, target: Target, seed: int) -> Student:
    """A fresh one, the same whatever is made beside it."""
    torch.manual_seed(seed)
    student: Student = KINDS[kind](target)
    return student


def note(path: Path, name: str, facts: dict[str, Any]) -> None:
    """Write what is known of one beside what is known of the others."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(dict(sorted((known | {name: facts}).items())), indent=2) + "\n")
    print(name, json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
