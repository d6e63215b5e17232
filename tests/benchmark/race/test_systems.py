"""What systems are asked for and what is read of their output, with scripts in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmark.race import steps
from benchmark.race.model import main, write_tokenizer
from benchmark.race.systems import Command, LlamaCpp, Lockstep, OpenVino, Task, Vllm, batched_bench_times
from benchmark.result import BenchError
from benchmark.serving.workload import WORDS
from tests.benchmark.race.fakes import BATCHED_BENCH, cell, make_llama_cpp, make_source

TINY_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 2000, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "rope_theta": 10000.0, "tie_word_embeddings": False, "sliding_window": 8, "attention_bias": True,
    "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}, "layer_types": ["full_attention"],
}  # fmt: skip


def task(**fields: object) -> Task:
    return Task(cell(**fields), Path("source"), Path("model"), runs=2, threads=4, kv_bytes=2**31)  # type: ignore[arg-type]


def run(command: Command) -> str:
    done = subprocess.run(command.arguments, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(done.stdout + done.stderr)
    return done.stdout


def test_a_table_of_batched_bench_is_read_behind_its_warm_up() -> None:
    assert {"prefill_ms": 2000.0, "decode_ms": 50.0} == batched_bench_times(BATCHED_BENCH, cell())
    twice = BATCHED_BENCH.replace("|    1 |    110 ", "|    8 |    880 ")
    assert 2000.0 == batched_bench_times(twice, cell())["prefill_ms"], "the first row is of the warm-up"


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("", "its output has no table"),
        (BATCHED_BENCH.replace("T_TG s", "T_TG ms"), "its table has no column T_TG s"),
        (BATCHED_BENCH.replace("|    8 |", "|    4 |"), "its table has no row of 100 x 8 behind the warm-up"),
        (BATCHED_BENCH.replace("2.000 |   400", "  inf |   400").replace("0.500", "n/a"), "times that are no numbers"),
        (BATCHED_BENCH.replace("0.500", "0.000"), "its output has no finite decode_ms above 0"),
        (BATCHED_BENCH.replace("0.500", "  nan"), "its output has no finite decode_ms above 0"),
        (BATCHED_BENCH.replace("0.500", "  inf"), "its output has no finite decode_ms above 0"),
    ],
)
def test_a_table_that_cannot_be_read_says_what_is_missing(printed: str, problem: str) -> None:
    with pytest.raises(BenchError, match=problem):
        batched_bench_times(printed, cell())


def test_llama_cpp_is_asked_for_a_warm_up_and_all_runs(tmp_path: Path) -> None:
    system = LlamaCpp("ik_llama.cpp", make_llama_cpp(tmp_path), ("-rtr",))
    arguments = list(system.steps(task()).arguments)
    assert str(tmp_path / "build/bin/llama-batched-bench") == arguments[0] and "-rtr" in arguments
    given = dict(pairwise(arguments))
    assert {"-npl": "1,8,8", "-npp": "100", "-ntg": "10", "-t": "4", "-tb": "4", "-c": "2048"} == {
        name: given[name] for name in ("-npl", "-npp", "-ntg", "-t", "-tb", "-c")
    }
    printed = run(system.steps(task()))
    assert {"prefill_ms": 2000.0, "decode_ms": 50.0} == system.times(printed, task())


def test_a_model_is_converted_without_a_change_to_the_converter_and_quantised_once(tmp_path: Path) -> None:
    source = make_source(tmp_path, "bloom-560m")
    folder = make_llama_cpp(tmp_path / "llama")
    before = (folder / "convert_hf_to_gguf.py").read_text()
    system, asked = LlamaCpp("llama.cpp", folder), list[str]()

    def counted(command: Command) -> str:
        asked.append(Path(command.arguments[0]).name)
        return run(command)

    for _ in range(2):
        model = system.make_model(source, tmp_path / "made", "int8", counted)
    assert "gpt-2 bf16 of transformers" == model.read_text() and "Q8_0.gguf" == model.name
    assert [Path(sys.executable).name, "llama-quantize"] == asked
    assert before == (folder / "convert_hf_to_gguf.py").read_text()
    reader = LlamaCpp("ik_llama.cpp", tmp_path, ("-rtr",), maker=system)
    made = system.make_model(source, tmp_path / "llama.cpp", "bf16", run)
    assert made == reader.make_model(source, tmp_path / reader.models_of, "bf16", run)
    with pytest.raises(BenchError, match="not divisible by 256"):
        system.make_model(source, tmp_path / "made", "q4_k_m", counted)
    assert not (tmp_path / "made" / "Q4_K_M.gguf").exists()


def test_a_folder_without_the_programs_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"has no llama-batched-bench, nor have its bin and build/bin"):
        LlamaCpp("llama.cpp", tmp_path).version()


def test_lockstep_is_asked_by_its_own_command() -> None:
    system = Lockstep("avx2")
    line = " ".join(system.steps(task(format="int4")).arguments)
    assert line.endswith(
        "-m benchmark latency --model-id model --device cpu --dtype bfloat16 --quantize int4 --cpu-kernels avx2 "
        "-b 8 -s 100 -d 10 -r 2 -w 0"
    )
    rows = [{"step": "prefill", "p50_ms": 3.0}, {"step": "decode_token", "p50_ms": 2.0}, {"step": "decode_total"}]
    printed = f"| a table |\n{json.dumps({'rows': rows})}\nlast words"
    assert {"prefill_ms": 3.0, "decode_ms": 2.0} == system.times(printed, task())
    with pytest.raises(BenchError, match="no finite decode_token p50_ms above 0"):
        system.times(json.dumps({"rows": rows[:1]}), task())
    with pytest.raises(BenchError, match="its output has no line of JSON"):
        system.times("nothing", task())


def test_engines_in_python_are_asked_by_one_script(tmp_path: Path) -> None:
    for system in (OpenVino(Path("/o/bin/python")), Vllm(Path("/v/bin/python"), Path("/c/bin/python"))):
        command = system.steps(task())
        python, script, engine, model, sizes = command.arguments
        assert Path(python).name == "python" and Path(script).name == "steps.py" and "model" == model
        assert {"openvino", "vllm"} & {engine}
        assert 3 == json.loads(sizes)["cache_gib"], "half as much again as the keys and values"
        assert {"prefill_ms": 4.0, "decode_ms": 1.0} == system.times(
            'said\n{"prefill_ms": [4, 5, 3], "decode_ms": [1.0]}', task()
        )
        for printed in ("{}", '{"prefill_ms": [], "decode_ms": []}', '{"prefill_ms": [0], "decode_ms": [1]}'):
            with pytest.raises(BenchError):
                system.times(printed, task())
    command = Vllm(Path("/v/bin/python"), Path("/c/bin/python")).server(task())
    assert ("/v/bin/vllm", "serve", "model") == tuple(command.arguments[:3])
    assert "1" == command.environment["VLLM_CPU_INT4_W4A8"]
    with pytest.raises(BenchError, match="its package has no server"):
        OpenVino(Path("/o/bin/python")).server(task())


def test_a_folder_that_was_being_made_is_made_again(tmp_path: Path) -> None:
    system, made = OpenVino(Path("python")), list[str]()

    def export(command: Command) -> str:
        folder = Path(command.arguments[-1])
        assert not folder.exists(), "what was left of an export that failed is gone"
        folder.mkdir()
        made.append(folder.name)
        if len(made) == 1:
            raise BenchError("the disk is full")
        return ""

    with pytest.raises(BenchError, match="the disk is full"):
        system.make_model(tmp_path, tmp_path, "int8", export)
    for _ in range(2):
        assert tmp_path / "int8" == system.make_model(tmp_path, tmp_path, "int8", export)
    assert ["int8.partial", "int8.partial"] == made and (tmp_path / "int8").is_dir()


def test_a_decode_step_is_what_further_tokens_add(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], list[tuple[int, int]]()
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock[0])

    def generate(prompts: object, count: int) -> None:
        asked.append((len(list(prompts)), count))  # type: ignore[call-overload]
        clock[0] += 2.0 + 0.5 * (count - 1)

    sizes = {"prompt_tokens": 5, "batch_size": 3, "decode_length": 11, "runs": 2}
    assert {"prefill_ms": [2000.0] * 2, "decode_ms": [500.0] * 2} == steps.measure(generate, sizes)
    assert [(1, 4), (3, 1), (3, 11), (3, 1), (3, 11)] == asked


def test_answers_of_another_length_are_an_error() -> None:
    steps.check([4, 4], 4)
    with pytest.raises(RuntimeError, match="answers have 3 to 4 tokens, not 4"):
        steps.check([4, 3], 4)


def test_each_word_of_a_prompt_is_one_token(tmp_path: Path) -> None:
    write_tokenizer(32_000, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert 32_000 == tokenizer.get_vocab_size()
    text = " " + " ".join(WORDS)
    ids = tokenizer.encode(text).ids
    assert len(WORDS) == len(ids) and text == tokenizer.decode(ids)
    assert "déjà vu\n🦙" == tokenizer.decode(tokenizer.encode("déjà vu\n🦙").ids)
    with pytest.raises(BenchError, match="a vocabulary of 300 tokens is too small"):
        write_tokenizer(300, tmp_path)


def test_experts_are_made_in_mxfp4_where_the_config_says_so(tmp_path: Path) -> None:
    shape = tmp_path / "tiny.json"
    shape.write_text(json.dumps(TINY_GPT_OSS))
    main([str(shape), str(tmp_path / "made")])
    assert "mxfp4" == json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]["quant_method"]
    made = load_file(tmp_path / "made/model.safetensors")
    blocks, scales = (made[f"model.layers.0.mlp.experts.gate_up_proj_{part}"] for part in ("blocks", "scales"))
    assert (4, 128, 2, 16) == blocks.shape and (4, 128, 2) == scales.shape
    assert torch.uint8 == blocks.dtype == scales.dtype
    assert torch.bfloat16 == made["model.layers.0.self_attn.q_proj.weight"].dtype
    shape.write_text(json.dumps(TINY_GPT_OSS | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BenchError, match="in bfloat16 and mxfp4, not fp8"):
        main([str(shape), str(tmp_path / "other")])
