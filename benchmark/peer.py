"""The same prompts by `generate` of the transformers library, in this process: what one would run without a server.

Its times are taken between the tokens that it appends, so one call gives the prefill and every decode step. Greedy,
with its own cache, in the dtype and with the threads of the shards. Torch and transformers are imported only when it is
used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.report import SampleSummary, table


@dataclass(frozen=True)
class PeerTimes:
    """One batch of one size, in milliseconds."""

    prefill: float
    decode_token: float  # mean over the decode steps


class TransformersPeer:
    """A model of the transformers library, loaded."""

    def __init__(self, location: str, *, random_weights: bool, dtype: str, device: str, threads: int) -> None:
        """Load the model. location: a folder or a repository; threads: 0 for as many as torch takes."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
        from transformers.utils import logging

        said: Any = logging
        said.disable_progress_bar()  # of its loading, amid our tables
        self._threads = threads
        config = AutoConfig.from_pretrained(location)
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        wanted = {"dtype": getattr(torch, dtype)}
        model = auto.from_config(config, **wanted) if random_weights else auto.from_pretrained(location, **wanted)
        self._model = model.to("cpu" if device == "cpu" else "cuda").eval()

    def run(self, prompts: Sequence[Sequence[int]], decode_length: int) -> PeerTimes:
        """Generate `decode_length` tokens for prompts of one length."""
        import torch
        from transformers import StoppingCriteriaList

        if self._threads:
            torch.set_num_threads(self._threads)
        input_ids = torch.tensor(prompts, device=self._model.device)
        times: list[float] = []

        def note_the_time(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        started = time.perf_counter()
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=decode_length,
            min_new_tokens=decode_length,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note_the_time]),
        )
        return PeerTimes(1000 * (times[0] - started), 1000 * (times[-1] - times[0]) / (decode_length - 1))


def peer_rows(rows: Sequence[dict[str, Any]], batch_size: int, runs: Sequence[PeerTimes]) -> list[dict[str, Any]]:
    """The peer's runs of one batch size beside our rows."""
    ours = {row["step"]: row["p50_ms"] for row in rows if row["batch_size"] == batch_size}
    found = []
    for step in ("prefill", "decode_token"):
        theirs = SampleSummary.of([getattr(run, step) for run in runs]).p50
        found.append(
            {"step": step, "batch_size": batch_size, "ours_ms": ours[step], "theirs_ms": theirs,
             "times_as_fast": theirs / ours[step]}
        )  # fmt: skip
    return found


def peer_table(rows: Sequence[dict[str, Any]], titles: dict[str, str]) -> str:
    """Our p50 beside the peer's for each step and batch size; empty where there was no peer."""
    cells = [
        [titles[r["step"]], r["batch_size"], f"{r['ours_ms']:.2f} ms", f"{r['theirs_ms']:.2f} ms",
         f"{r['times_as_fast']:.2f} x"]
        for step in titles for r in rows if r["step"] == step
    ]  # fmt: skip
    return table(("Step", "Batch Size", "p50", "transformers, p50", "Times as fast"), cells) if cells else ""
