"""The command `lockstep quantize`: a sentence for a wrong option, a folder that is whole or absent, bounded memory."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import launcher
from launch.commands import quantize
from launch.config import DEMO
from launch.errors import Refusal
from server.quantize.command import failure
from server.quantize.output_folder import partial_of
from server.quantize.recipe import Job
from tests.embedded_model import corpus
from tests.running import ROOT
from tests.server.quantize.making import Served

LAYERS = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("</s>".join(document.text for document in corpus.take(4242, 120)))
    return path


def started(arguments: Sequence[str], **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launcher.py"), "quantize", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.rest
def test_the_embedded_model_becomes_a_checkpoint_that_is_served_as_told(text: Path, tmp_path: Path) -> None:
    """Three processes deep, as people call it."""
    arguments = ["--bits", "2", "--num-samples", "16", "--sample-tokens", "128"]
    job = started([str(DEMO), "--output", str(tmp_path / "made"), "--text", str(text), *arguments])
    out, err = job.communicate(timeout=300)
    assert 0 == job.returncode, err
    assert re.search(r"^\d+ samples of \d+ tokens, and \d+ more held out$", err, re.MULTILINE)
    assert "layer 4 of 4" in err and "square error of outputs" in err
    before, after = (float(out.split(f" {word}")[0].split()[-1]) for word in ("before", "after"))
    samples = quantize.read_command(
        [str(DEMO), "--output", str(tmp_path / "other"), "--text", str(text), *arguments], {}
    ).job(DEMO, DEMO, DEMO)
    assert before == pytest.approx(Served(DEMO).perplexity(samples.held_out), rel=1e-3)
    assert after == pytest.approx(Served(tmp_path / "made").perplexity(samples.held_out), rel=1e-3)
    assert before < after < 1.15 * before
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    assert ["made"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_nothing_that_looks_whole(number: int, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    job = started([str(DEMO), "--output", str(target), "--text", str(text), "--num-samples", "24"])
    partial = partial_of(tmp_path / "made")
    patience = time.monotonic() + 120
    while not partial.is_dir() and time.monotonic() < patience:
        time.sleep(0.05)
    assert partial.is_dir() and job.poll() is None
    if number == signal.SIGKILL:
        os.killpg(job.pid, number)
    else:
        job.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert not target.exists()
    assert not (partial / "config.json").exists()
    if number != signal.SIGKILL:
        assert 128 + number == job.returncode
        assert f"error: stopped by {signal.Signals(number).name}: nothing is made" in err and "Traceback" not in err
        assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--bits", "5"], "--bits is 5: --method gptq takes 2 or 3 or 4 or 8"),
        (["--bits", "4", "--method", "w8a8"], "--bits is 4: --method w8a8 takes 8"),
        (["--group-size", "100"], "--group-size is 100: give a multiple of 8, or -1 for one group in each row"),
        (["--smooth", "1.5", "--method", "w8a8"], "--smooth is 1.5: give a number from 0, which is none, to 1"),
        (["--smooth", "0.5"], "--smooth is of --method w8a8, and --method is gptq: leave it out"),
        (["--method", "w8a8", "--group-size", "64"], "--group-size is 64: --method w8a8 has one scale for each row"),
        (["--method", "awq", "--plain-order"], "--plain-order is of --method gptq, and --method is awq: leave it out"),
        (["--num-samples", "1"], "--num-samples is 1: give 2 to 4096"),
        (["--sample-tokens", "8"], "--sample-tokens is 8: give 16 to 32768"),
        (["--output", str(DEMO)], f"--output {DEMO} is there already and not empty: give another folder, or remove it"),
        (["--methd", "awq"], "--methd is not an option: did you mean --method?"),
        (["--zzz"], "--zzz is not an option: see lockstep quantize --help"),
        (["more"], "more belongs to no option: see lockstep quantize --help"),
        (
            ["--quantize", "int4"],
            "--quantize is not an option of lockstep quantize, only of lockstep itself: see lockstep quantize --help",
        ),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], expected: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        quantize.read_command([str(DEMO), "--output", str(tmp_path / "made"), "--text", str(text), *arguments], {})
    assert any(problem.startswith(expected) for problem in refusal.value.problems) and refusal.value.code == 2


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time. " * 10)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd" * 99)
    for name, expected in {
        "text.txt": "tokens, and a sample has 512",
        "binary": "not UTF-8",
        "none": "cannot be read",
    }.items():
        command = quantize.read_command(
            [str(DEMO), "--output", str(tmp_path / "made"), "--text", str(tmp_path / name)], {}
        )
        with pytest.raises(Refusal, match=expected):
            command.job(DEMO, DEMO, DEMO)


def test_an_interrupt_while_the_text_is_cut_is_a_sentence(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize.ModelTokenizer, "encode_plain", interrupted)
    command = quantize.read_command([str(DEMO), "--output", str(tmp_path / "made"), "--text", str(text)], {})
    with pytest.raises(Refusal, match="stopped by SIGINT: nothing is made, start again") as refusal:
        command.job(DEMO, DEMO, DEMO)
    assert 128 + signal.SIGINT == refusal.value.code


def test_an_interrupt_before_anybody_heeds_it_is_a_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(launcher.COMMANDS, "quantize", interrupted)
    assert 128 + signal.SIGINT == launcher.main(["quantize"])
    assert "error: stopped by SIGINT: nothing is made, start again\n" == capfd.readouterr().err


def test_samples_are_cut_from_the_text_and_the_last_are_held_out(text: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False).ids
    options = ["--output", str(tmp_path / "made"), "--text", str(text), "--num-samples", "16", "--sample-tokens", "64"]
    job = quantize.read_command([str(DEMO), *options], {}).job(DEMO, DEMO, DEMO)
    assert (16, 2) == (len(job.calibration), len(job.held_out))
    assert ids[: 64 * 18] == [id for sample in (*job.calibration, *job.held_out) for id in sample]
    other = quantize.read_command([str(DEMO), *options, "--held-out", str(text)], {}).job(DEMO, DEMO, DEMO)
    assert job.calibration == other.calibration and other.held_out == job.calibration[:2]
    assert job == Job.from_json(job.to_json())


PEAK = """
import sys, threading, time
from pathlib import Path
from server.quantize.recipe import Recipe
from tests.server.quantize.making import make
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) << 10
make(Recipe(*RECIPE), Path(sys.argv[1]), Path(sys.argv[3]))  # a small one: what libraries keep is taken
base, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
make(Recipe(*RECIPE), Path(sys.argv[2]), Path(sys.argv[4]))
done = True
thread.join()
print(peak - base)
"""


@pytest.mark.rest
@pytest.mark.parametrize("recipe", [("w8a8", 8, -1), pytest.param(("gptq", 4, 128), marks=pytest.mark.offload)])
def test_memory_is_bounded_by_a_layer_and_not_by_the_model(tmp_path: Path, recipe: tuple[str, int, int]) -> None:
    """Of a model of 24 layers, half is never there: neither its own weights nor, at 1 MiB a file, what is made."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    common = {"vocab_size": 103, "max_position_embeddings": 128, "tie_word_embeddings": True}
    nbytes = {}
    for layers in (1, LAYERS):
        config = AutoConfig.for_model("llama", num_hidden_layers=layers, **sizes, **common)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(layers))
        nbytes[layers] = (tmp_path / str(layers) / "model.safetensors").stat().st_size
    layer = (nbytes[LAYERS] - nbytes[1]) // (LAYERS - 1)
    script = f"import server.quantize.output_folder as folder; folder.SHARD_BYTES, RECIPE = 1 << 20, {recipe}{PEAK}"
    command = [sys.executable, "-c", script, *(str(tmp_path / name) for name in ("1", str(LAYERS), "a", "b"))]
    # With an arena of the heap for each thread, a busy machine decides how much is kept for later.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    print(f"{int(job.stdout) / layer:.1f} layers")
    assert int(job.stdout) < LAYERS // 2 * layer, f"{int(job.stdout) / layer:.1f} layers"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "(No space left on device): make room on its disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/out/made"), "(Disk quota exceeded): make room on its disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), "(Permission denied): give another --output"),
        (OSError(errno.EIO, "I/O error", "/out/.made.lockstep-partial/a"), "(I/O error): give another --output"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "(os error 28)): make room on its disk"),
        (SafetensorError("I/O error: Read-only (os error 30)"), "(os error 30)): give another --output"),
    ],
)
def test_the_remedy_fits_what_the_system_says(error: OSError | SafetensorError, expected: str) -> None:
    found = failure(error, "/out/made")
    assert found.startswith("cannot write /out/made (") and found.endswith(expected)


def test_a_file_of_the_model_that_cannot_be_read_is_named() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/out/a/config.json")
    expected = "/out/a/config.json cannot be read (Permission denied): fetch the model again, or give another one"
    assert expected == failure(error, "/out/made")
