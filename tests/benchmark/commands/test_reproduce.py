"""`reproduce`: the documents' figures, their sweeps and limits, whole and reduced runs, and what is refused."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.commands import latency, reproduce
from benchmark.cost import devices
from benchmark.cost.devices import Machine
from benchmark.cost.roofline import Ceilings, ServedModel
from benchmark.cost.shapes import from_config
from benchmark.report import pictures
from benchmark.result import BenchError
from benchmark.seeds import documents, measurements

NAMES = ["flexgen-opt", "tgi-bloomz", "vllm-baichuan2-gptq", "vllm-chatglm3", "vllm-mistral-awq"]
FIGURES = {"flexgen-opt": 8, "tgi-bloomz": 90, "vllm-baichuan2-gptq": 15, "vllm-chatglm3": 16, "vllm-mistral-awq": 32}
CPU = Machine("cpu", 1, 64e9, 2)
GPU = Machine("NVIDIA Imagined", 1, 140e9, 16)


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    return parser.parse_args(flags)


def scale(name: str, *flags: str) -> documents.Scale:
    return documents.scale_of(documents.find(name), arguments(name, *flags))


# ------------------------------------------------------------------------------------------------------- documents


def test_every_document_is_there_with_all_its_rows() -> None:
    assert NAMES == documents.names()
    assert FIGURES == {name: sum(len(table.rows) for table in documents.find(name).tables) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_figures_fit_each_other(name: str) -> None:
    """A typing error in one figure would contradict another."""
    seed = documents.find(name)
    for table in seed.tables:
        for row in table.rows:
            if seed.kind == "serving":
                ratio = row["latency_per_token_ms"] * (row["input_length"] + row["output_length"])
                alone = row["latency_per_output_token_ms"] * row["output_length"]
                if table.system.startswith("vllm"):  # every answer has its tokens
                    tokens = row["requests_per_second"] * row["output_length"]
                    assert row["output_tokens_per_second"] == pytest.approx(tokens, abs=0.006 * row["output_length"])
                    assert ratio == pytest.approx(alone, rel=0.01)
            elif seed.kind == "flexgen":
                tokens = row["num_gpu_batches"] * 8 * 32
                assert tokens / row["total_latency_s"] == pytest.approx(row["total_tokens_per_second"], rel=1e-3)
            elif "mean_ms" in row:
                assert row["min_ms"] <= row["mean_ms"] <= row["max_ms"] >= row["p50_ms"] >= row["min_ms"]


def test_times_and_rates_of_steps_fit_each_other() -> None:
    tables = documents.find("tgi-bloomz").tables
    assert [2, 2, 4, 4, 8, 8] == [table.num_shard for table in tables]
    for times, rates in zip(tables[::2], tables[1::2], strict=True):
        for row in rates.rows:
            found = times.row(step=row["step"], batch_size=row["batch_size"])
            assert found is not None
            tokens = row["batch_size"] * (99 if row["step"] == "decode_total" else 1)
            assert 1000 * tokens / found["mean_ms"] == pytest.approx(row["mean_per_second"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "table", "row", "percents"),
    [
        ("tgi-bloomz", 0, 0, {"percent_of_limit": 6.9}),
        ("tgi-bloomz", 4, 11, {"percent_of_limit": 1.9}),
        ("vllm-mistral-awq", 0, 0, {"throughput_percent": 10.8, "latency_percent": 20.3}),
        ("vllm-baichuan2-gptq", 0, 0, {"throughput_percent": 14.4, "latency_percent": 42.0}),
        ("flexgen-opt", 1, 3, {"percent_of_limit": 17.0}),
    ],
)
def test_shares_of_the_documents_hardware(name: str, table: int, row: int, percents: dict[str, float]) -> None:
    seed = documents.find(name)
    found = measurements.document_percents(
        seed, measurements.of_document(seed, seed.tables[table].num_shard), seed.tables[table].rows[row]
    )
    assert percents == {key: pytest.approx(found[key], abs=0.06) for key in percents}


def test_the_concurrency_of_a_row_by_hand() -> None:
    """Little's law: 2,944.63 tokens a second that take 13.63 ms each are 40.1 requests at once; in all 2.4 to 40."""
    found = {name: documents.find(name) for name in NAMES if documents.find(name).kind == "serving"}
    row = found["vllm-chatglm3"].tables[0].row(input_length=128, output_length=512)
    assert row is not None and 2944.63 * 0.01363 == pytest.approx(documents.concurrency(row))
    every = [documents.concurrency(row) for seed in found.values() for table in seed.tables for row in table.rows]
    assert (2.424, 40.135) == (pytest.approx(min(every), abs=5e-4), pytest.approx(max(every), abs=5e-4))


def test_a_document_s_limit_is_of_its_own_concurrency_too() -> None:
    """36.8 sequences on an A100: 11.95 GB are read 128 times with their keys at 1.555 TB/s, whatever steps do it."""
    seed = documents.find("vllm-chatglm3")
    row, limit = seed.tables[0].rows[0], measurements.of_document(seed, 1)
    found = measurements.document_percents(seed, limit, row)
    sequences = 2733.53 * 0.01348  # of which ours are whole streams: 37
    decodes = 127 * sequences * (128 + 64)  # keys and values that are read or written, and those of the prompts
    seconds = (128 * 11.954e9 + (sequences * 128 + decodes) * 28_672) / 1.555e12
    assert 100 * 2733.53 / (sequences * 128 / seconds) == pytest.approx(found["loaded_throughput_percent"], rel=3e-4)
    assert found["loaded_throughput_percent"] > found["throughput_percent"]  # 256 sequences could have more


def test_a_limit_is_of_the_answers_that_a_document_had() -> None:
    """527.28 token/s in 0.70 requests/s are answers of 753 tokens, where 2,048 were asked for."""
    seed = documents.find("vllm-mistral-awq")
    (full, short), limit = (table.rows[-1] for table in seed.tables), measurements.of_document(seed, 1)
    assert (2048, 2048) == (full["output_length"], documents.answer_length(full))
    assert 753 == pytest.approx(documents.answer_length(short), abs=0.5)
    found = measurements.document_percents(seed, limit, short)
    most = limit.tokens_per_second(measurements.MOST_SEQUENCES, 2048, 753)
    assert 100 * 527.28 / most == pytest.approx(found["throughput_percent"], rel=2e-3)
    assert most > 1.2 * limit.tokens_per_second(measurements.MOST_SEQUENCES, 2048, 2048)
    assert limit.output_token_ms(2048, 753) == pytest.approx(21.99 * found["latency_percent"] / 100, rel=2e-3)
    every = [(table.system[:4], row) for one in NAMES for table in documents.find(one).tables for row in table.rows]
    assert {"tgi "} == {
        system for system, row in every if "output_length" in row
        and documents.answer_length(row) < row["output_length"]
    }  # fmt: skip


def test_all_arguments_of_the_document_s_tool_have_one_of_ours() -> None:
    seed, own = documents.find("tgi-bloomz"), argparse.ArgumentParser()
    latency.add_arguments(own)
    options = {option for action in own._actions for option in action.option_strings}
    assert [
        "Model", "Sequence Length", "Decode Length", "N Runs", "Warmups", "Temperature", "Top K", "Top P", "Typical P",
        "Repetition Penalty", "Watermark", "Do Sample",
    ] == [one["parameter"] for one in seed.arguments]  # fmt: skip
    assert [] == [one["option"] for one in seed.arguments if one["option"] not in options]
    ours = [one["ours"].format_map({"model": "M", **seed.sweep}) for one in seed.arguments]
    assert [one["document"] for one in seed.arguments][1:] == ours[1:]


def test_why_the_document_s_diagonal_order_is_faster_by_hand() -> None:
    """Not by a larger block: per batch of 8 and token 16.2 and 8.4 ms, where weights and keys take 4.5 ms to read."""
    seed = documents.find("flexgen-opt")
    origin, level = seed.tables
    last = level.rows[3]
    means = [1000 * row["decode_latency_s"] / (31 * 32) for row in (origin.rows[3], last)]
    assert [16.2, 8.4] == pytest.approx(means, abs=0.05)
    (said,) = re.findall(r"takes ([\d.]+) ms for each batch and token in one order and ([\d.]+) ms", str(seed.notes))
    assert [f"{mean:.1f}" for mean in means] == list(said)
    weights, keys = 2_631_516_160, 8 * (512 + 16) * 196_608
    assert 4.5 == pytest.approx(1000 * (weights + keys) / 768e9, abs=0.05)
    assert 25.5 == last["cache_size_gb"] == 8 * 32 * 544 * 196_608 / 2**30  # all of it, as its zig-zag order has


def test_a_document_keeps_the_format_of_its_model() -> None:
    for name, words in (("vllm-mistral-awq", "awq, 4 bits"), ("vllm-baichuan2-gptq", "gptq, 4 bits")):
        stored = documents.find(name).model(2).shape.stored
        assert stored is not None and stored.description.startswith(words)
    assert documents.find("vllm-chatglm3").model(3).shape.spec.num_layers == 3


def test_a_format_that_is_not_there_yet_says_so() -> None:
    seed = replace(documents.find("vllm-mistral-awq"), config_changes={"quantization_config": {"quant_method": "exl2"}})
    with pytest.raises(BenchError, match=r"vllm-mistral-awq cannot be reproduced yet: .*exl2"):
        seed.model(None)


def test_a_schedule_that_is_not_there_yet_says_so() -> None:
    seed = documents.find("flexgen-opt")
    seed = replace(seed, tables=[replace(seed.tables[0], schedule="column")])
    job = measurements.Job(seed, scale("flexgen-opt"), CPU, "bfloat16", [1], Path("x.json"))
    with pytest.raises(BenchError, match="cannot be reproduced yet: there is no schedule column"):
        next(measurements.rows(job, list))


# ---------------------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("name", NAMES)
def test_without_options_the_whole_sweep_is_run(name: str) -> None:
    found = scale(name)
    assert ((), None) == (found.reductions, found.layers)


def test_what_is_reduced_is_named() -> None:
    found = scale("tgi-bloomz", "--layers", "2", "--batch-size", "4", "1", "--runs", "3")
    assert ("2 of 30 layers", "batch sizes 1 4 of 1 2 4 8 16 32", "runs 3 of 10") == found.reductions
    assert [1, 4] == found.several("batch_size") and 100 == found.one("decode_length")
    assert () == scale("tgi-bloomz", "--layers", "30", "--runs", "10").reductions


def test_a_load_that_no_document_names_reduces_nothing() -> None:
    found = scale("vllm-chatglm3", "--concurrency", "16")
    assert ((), 16, 64) == (found.reductions, found.streams, found.one("num_requests"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["tgi-bloom"], "no seed is called tgi-bloom: give one of " + ", ".join(NAMES)),
        (["tgi-bloomz", "--layers", "31"], "--layers is 31, and bloomz-7b1-mt has 30: give at most so many"),
        (["tgi-bloomz", "--batch-size", "64"], "--batch-size is 64, and tgi-bloomz goes up to 32: give at most that"),
        (["tgi-bloomz", "--runs", "11"], "--runs is 11, and tgi-bloomz goes up to 10"),
        (["tgi-bloomz", "--input-length", "9"], "--input-length is no size of tgi-bloomz: leave it out, or give one"),
        (["tgi-bloomz", "--concurrency", "9"], "--concurrency is for documents of servers, and tgi-bloomz is none"),
        (["flexgen-opt", "--input-length", "9", "8"], "--input-length is 9 8, and flexgen-opt has one such size"),
        (["flexgen-opt", "--num-shard", "2"], "--num-shard is 2, and flexgen-opt has one device: leave it out"),
        (["tgi-bloomz", "--num-shard", "3"], "--num-shard is 3: the model has 32 attention heads, which --num-shard 3"),
        (["tgi-bloomz", "--device", "cuda", "--num-shard", "2"], "--num-shard is 2, and this machine has 1 GPUs"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "machine_at_hand", lambda kind: GPU if kind == "cuda" else CPU)
    assert 1 == main(["reproduce", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {problem}")


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BenchError, match="--device is cuda, and this machine shows no GPU: give cpu"):
        devices._look("cuda")
    found = devices._look("auto")
    assert found.is_cpu and found.free_bytes > 2**20 and found.most_shards >= 1


# ---------------------------------------------------------------------------------------------------------- memory


def test_too_little_memory_is_said_with_what_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "machine_at_hand", lambda kind: replace(CPU, free_bytes=10e9))
    assert 1 == main(["reproduce", "tgi-bloomz"])
    said = capsys.readouterr().err
    pattern = r"needs 14\.1 GB for 30 layers and 3\.3 GB for keys and values of 6656 tokens, and 10\.0 GB are free"
    assert re.search(pattern, said)
    (fitting,) = re.findall(r"give --layers (\d+), which fits", said)
    seed, poor = documents.find("tgi-bloomz"), replace(CPU, free_bytes=10e9)
    measurements.require_room(seed, scale("tgi-bloomz", "--layers", fitting), poor, "bfloat16", 2)
    with pytest.raises(BenchError, match="which fits"):
        measurements.require_room(seed, scale("tgi-bloomz", "--layers", str(int(fitting) + 1)), poor, "bfloat16", 2)


def test_where_no_layer_fits_the_sizes_must_shrink() -> None:
    with pytest.raises(BenchError, match="give --quick, or smaller sizes"):
        measurements.require_room(
            documents.find("tgi-bloomz"), scale("tgi-bloomz"), replace(CPU, free_bytes=1e9), "float16", 2
        )


# ------------------------------------------------------------------------------------------------------------ runs


class Fake:
    """Stands for the other commands: notes their lines, and answers with figures of its own."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> Mapping[str, Any]:
        self.commands.append(command)
        return {"rows": list({"latency": self.latency, "serving": self.serving, "offline": self.offline}[command[0]]())}

    def values(self, option: str) -> list[int]:
        command = list(self.commands[-1])
        values = []
        for value in command[command.index(option) + 1 :]:
            if value.startswith("--"):
                break
            values.append(int(value))
        return values

    def latency(self) -> list[dict[str, Any]]:
        names = ("mean_ms", "min_ms", "max_ms", "p50_ms", "p90_ms", "p99_ms")
        return [
            {"step": step, "batch_size": n, **dict.fromkeys(names, 7.0), "percent_of_limit": 12.5, "floor_ms": 1.0,
             "limit": "measured", "samples_ms": [7.0], "tokens_per_sample": n}
            for step in ("prefill", "decode_token", "decode_total") for n in self.values("--batch-size")
        ]  # fmt: skip

    def serving(self) -> list[dict[str, Any]]:
        names = (
            "requests_per_second", "output_tokens_per_second", "latency_per_token_ms", "latency_per_output_token_ms",
        )  # fmt: skip
        (streams,) = self.values("--concurrency")
        return [
            {"input_length": i, "output_length": o, **dict.fromkeys(names, 7.0 * streams), "errors": 0, "requests": 3}
            for i in self.values("--input-length") for o in self.values("--output-length")
        ]  # fmt: skip

    def offline(self) -> list[dict[str, Any]]:
        figures = {f"{k}_{f}": 7.0 for k in ("prefill", "decode", "total") for f in ("latency_s", "tokens_per_second")}
        sizes = dict.fromkeys(
            [f"{n}_bytes" for n in ("model_size", "cache_size", "hidden_size", "peak_host_memory")], 2**30
        )
        (count,), command = self.values("--num-gpu-batches"), list(self.commands[-1])
        schedule = command[command.index("--schedule") + 1]
        return [
            {"schedule": schedule, "num_gpu_batches": count, **figures, **sizes, "peak_gpu_memory_bytes": None,
             "projected": False, "sequences_at_once": 8 * count,
             "level_tokens_per_second": 8.0 if schedule == "diagonal" else None}
        ]  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(reproduce, "machine_at_hand", lambda kind: GPU if kind == "cuda" else CPU)
    monkeypatch.setattr(measurements, "ceilings_of", lambda *which: Ceilings(50e9, 1e12))
    monkeypatch.setattr(measurements.rows, "__defaults__", (found,))
    return found


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("tgi-bloomz", [
            "# Tensor Parallel (TP) - 2 shards of one CPU", "7.00 / 65.65 ms", "| 12.5", "| 6.9 ",
            "| % of limit (measured) | The document's % of limit (data sheet) |",
        ]),
        ("vllm-mistral-awq", [
            "## vllm v0.2.5", "## tgi v1.3.4", "1792.00 / 9.36", "7.00 / 12.62", "   20.3   ",
            # Concurrency 15.1 and 18.2: 15 and 18 streams of 7 each.
            "105.00 / 9.36", "105.00 / 12.62", "126.00 / 10.86", "126.00 / 16.47",
        ]),
        ("vllm-chatglm3", ["## vllm v0.2.7", "1792.00 / 2733.53", "8.2 to 40.1 of them", "280.00 / 5.75"]),
        ("vllm-baichuan2-gptq", [
            "## vllm 0.2.7", "1792.00 / 865.93", "1792.00 / –", "2.4 to 10.6 of them", "21.00 / 1.83",
        ]),
        ("flexgen-opt", ["7.0 / 386.5", "3.000 ", "1.000 / 28.987", "1.000 / 27.749", " 8.0 "]),
    ],
)  # fmt: skip
def test_a_whole_run_has_the_documents_figure_beside_each_of_ours(
    name: str, figures: list[str], fake: Fake, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "wanted", lambda output: name in ("tgi-bloomz", "vllm-chatglm3"))
    assert 0 == main(["reproduce", name, "--output", str(tmp_path)])
    text = (tmp_path / "result.md").read_text()
    assert [] == [figure for figure in figures if figure not in text]
    assert " of " not in text.splitlines()[0]
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["reductions"] == []
    assert {"tgi-bloomz": 1, "vllm-chatglm3": 4}.get(name, 0) == len(list(tmp_path.glob("*.png")))


@pytest.mark.parametrize("name", NAMES)
def test_a_reduced_run_says_so_in_its_title_and_shows_no_figure_of_the_document(
    name: str, fake: Fake, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "wanted", lambda output: False)
    assert 0 == main(["reproduce", name, "--quick", "--output", str(tmp_path)])
    count = len(fake.commands)
    said = [line for line in capfd.readouterr().err.splitlines() if f" of {count}: command of {name}" in line]
    assert len(said) == (count if count > 1 else 0)  # as many stages as there were commands
    text = (tmp_path / "result.md").read_text()
    assert re.match(r"# .* \(2 of \d+ layers; ", text)
    assert " / " not in text.split("\n- ")[0]
    assert not any(row["document"] for row in json.loads((tmp_path / "result.json").read_text())["rows"])


def test_a_single_gpu_stands_beside_the_fewest_of_the_document(fake: Fake, tmp_path: Path) -> None:
    assert 0 == main(["reproduce", "tgi-bloomz", "--device", "cuda", "--layers", "30", "--output", str(tmp_path)])
    text = (tmp_path / "result.md").read_text()
    assert "# Tensor Parallel (TP) - 1 GPU, beside the document's 2 GPUs" in text
    assert "NVIDIA Imagined" in text.splitlines()[0] and "a100-40g, an assumption" in text
    assert "float16" in fake.commands[0]  # as the document; a CPU would compute in bfloat16


def test_short_answers_of_a_document_are_named() -> None:
    (said,) = reproduce.short_answers(documents.find("vllm-mistral-awq"))
    assert said.startswith("Answers of tgi v1.3.4 were short in 15 of 16 rows, with 14 % of their tokens at worst")
    assert [] == reproduce.short_answers(documents.find("vllm-chatglm3"))


def test_a_block_is_run_alone_as_in_the_document(fake: Fake, tmp_path: Path) -> None:
    assert 0 == main(["reproduce", "flexgen-opt", "--output", str(tmp_path)])
    prompts = [
        (line[list(line).index("--schedule") + 1], line[list(line).index("--num-prompts") + 1])
        for line in fake.commands
    ]
    # The diagonal order, which fills and empties once in a run, has four blocks.
    assert [(name, str(n * 8 * k)) for n in (4, 8, 16, 32) for name, k in (("zig-zag", 1), ("diagonal", 4))] == prompts


def test_what_was_measured_before_a_failure_is_kept(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(command: Sequence[str]) -> Mapping[str, Any]:
        if len(fake.commands) == 2:
            raise BenchError("offline failed: the disk is full")
        return fake(command)

    monkeypatch.setattr(measurements.rows, "__defaults__", (failing,))
    assert 1 == main(["reproduce", "flexgen-opt", "--output", str(tmp_path)])
    assert 2 == len(json.loads((tmp_path / "result.json").read_text())["rows"])
    assert "**Incomplete**: offline failed: the disk is full" in (tmp_path / "result.md").read_text()
    assert "error: offline failed: the disk is full" in capsys.readouterr().err


def test_a_command_that_fails_says_why_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match="plan failed: no shape is called gpt-17"):
        measurements.run_command(["plan", "--model-id", "gpt-17", "--device", "l4"])
    assert "lockstep-bench plan --model-id gpt-17" in capfd.readouterr().err


def test_a_command_leaves_its_result() -> None:
    assert measurements.run_command(["plan", "--model-id", "bloom-560m", "--device", "l4"])["rows"]


def test_streams_that_do_not_fit_raise_no_limit() -> None:
    """As many sequences as the memory has keys and values for, and one at least."""
    shape = from_config({"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_head": 4, "n_layer": 2})
    limit = measurements.Limit(ServedModel(shape, "float16"), Ceilings(1e9, 1e12), 1e6)
    assert limit.tokens_per_second(10**6, 16, 16) == limit.tokens_per_second(10**7, 16, 16)
    assert limit.tokens_per_second(1, 16, 16) == replace(limit, free_bytes=0.0).tokens_per_second(9, 16, 16)
