"""What the ranks of a model tell each other in a step, and the least that it takes: messages and bytes.

A rank has part of every layer, of the table of words and of the head. So what attention and mlp add is summed over the
ranks, the table's rows are summed up from where they are, and of the logits each rank tells the best of its own.
Left out: thresholds of top-p and the like, eight more exchanges of a sampling step, and what hides behind computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmark.roofline import ServedModel
from benchmark.shapes import DTYPE_BYTES
from server.arch.spec import ArchSpec, Residual

SECONDS = 5e-6  # of the smallest exchange between GPUs of one machine: the messages there and back
OF_A_LAYER: Mapping[Residual, int] = {
    Residual.PRE_CROSS: 3,
    Residual.PARALLEL_ONE_NORM: 1,  # attention and mlp can be summed together
    Residual.PARALLEL_TWO_NORMS: 1,
}
CANDIDATE_BYTES = 12  # of a sequence from each rank: a value, a token, and the log of the sum of all exponentials


@dataclass(frozen=True)
class Sums:
    """Exchanges of a model's ranks, in seconds: by what they are for. Nothing by default, as of one rank."""

    step_s: float = 0.0  # of any step, however little it computes
    token_s: float = 0.0  # of each token in it besides
    choice_s: float = 0.0  # of a step in which any sequence gets a token
    sampled_s: float = 0.0  # of each of those
    encode_s: float = 0.0  # of a step with prompts for an encoder
    encoded_s: float = 0.0  # of each token of those

    @classmethod
    def of(cls, served: ServedModel, bytes_per_second: float) -> Sums:
        """Those of a model, or of one of its pipeline stages, over links of this speed.

        A sum moves 2 (N - 1) / N of its bytes from every rank to the others, in whichever order (Patarasuk and Yuan
        2009); candidates go to each of the others.
        """
        shape, others = served.shape, served.ranks - 1
        if not others:
            return cls()
        row_s = 2 * others / served.ranks * DTYPE_BYTES[served.dtype] / bytes_per_second  # of each feature
        spec, table = shape.spec, int(shape.has_embedding)
        width = spec.embed_dim or spec.hidden_size
        encoder = spec.encoder if shape.has_embedding else None
        return cls(
            step_s=(_of_layers(spec) + table) * SECONDS,
            token_s=(_of_layers(spec) * spec.hidden_size + table * width) * row_s,
            choice_s=shape.has_head * SECONDS,
            sampled_s=shape.has_head * others * CANDIDATE_BYTES / bytes_per_second,
            encode_s=(_of_layers(encoder) + 1) * SECONDS if encoder else 0.0,
            encoded_s=(_of_layers(encoder) * encoder.hidden_size + width) * row_s if encoder else 0.0,
        )

    def seconds(self, tokens: float, sampled: float, encoded: float = 0) -> float:
        """What the exchanges of a step take. encoded: tokens of prompts that its encoder reads."""
        found = self.step_s + self.token_s * tokens
        found += self.choice_s + self.sampled_s * sampled if sampled else 0.0
        return found + (self.encode_s + self.encoded_s * encoded if encoded else 0.0)


def _of_layers(spec: ArchSpec) -> int:
    return spec.num_layers * OF_A_LAYER.get(spec.residual, 2)
