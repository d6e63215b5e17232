"""`lockstep quantize` over all families: what it makes is read, and is as near to the model as its numbers say."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from server.quantisation.stored import QuantisedWeight
from server.quantize import command
from server.quantize.calibration import Inputs
from server.quantize.channel_scales import Origin, divide, within
from server.quantize.command import Bar
from server.quantize.edited_checkpoint import EditedCheckpoint, FinishedFormat
from server.quantize.layerwise import Progress, Quantiser
from server.quantize.output_folder import MARKER, output_folder, partial_of
from server.quantize.plan import PLACES
from server.quantize.recipe import Recipe, output_problem
from tests.server.quantize.making import Made, Served, drawn, make
from tests.server.tiny import save_tiny

HELD_OUT = drawn(2, 48, seed=1)
TokenSamples = tuple[tuple[int, ...], ...]

# Every way in which a family differs to this command: fused, grouped, transposed, tied, experts, wirings, norms.
FAMILIES = [
    "bloom",
    "opt-350m",
    "gpt2",
    "falcon-40b",
    "llama-biased-tied",
    "qwen3_moe",
    "gemma2",
    "phi3",
    "mpt-clipped",
    "afmoe",
    "deepseek_v3",
    "lfm2_moe",
    "qwen3_next",
    "nemotron_h",
    "falcon_h1",
]
MORE_FAMILIES = [
    *("bloom-normed-residual", "opt", "gpt_bigcode", "gpt_neox", "falcon-7b", "llama", "mistral", "mixtral", "qwen2"),
    *("gemma", "stablelm", "starcoder2", "granitemoe", "granitemoehybrid", "granitemoehybrid-dense", "mamba2"),
    *("deepseek_v2-lite", "qwen3_5", "gemma4"),
]
# Method -> families that between them have every place to which scales move.
FOLDED = {
    "awq": ["bloom", "falcon-40b", "mixtral", "phi3", "deepseek_v3", "qwen3_next"],
    "w8a8": ["falcon-7b", "gpt_neox", "llama-biased-tied", "gemma"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            save_tiny(case, made[case])
        return made[case]

    return folder


def changed(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model with other tensors."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


def with_number(name: str, number: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[5:6].fill_(number)


def check(made: Made, model: Path, *, most: float) -> None:
    """What is served of it has the perplexity that was told, and logits near the model's."""
    dense, quantised = Served(model), Served(made.folder)
    assert made.outcome.perplexity.before == pytest.approx(dense.perplexity(HELD_OUT), rel=1e-4)
    assert made.outcome.perplexity.after == pytest.approx(quantised.perplexity(HELD_OUT), rel=1e-3)
    assert made.outcome.bytes_after < 0.75 * made.outcome.bytes_before
    exact, found = dense.logits(HELD_OUT[0]), quantised.logits(HELD_OUT[0])
    assert float((found - exact).square().sum() / exact.square().sum()) < most


@pytest.mark.parametrize(
    "case", [*FAMILIES, *(pytest.param(case, marks=pytest.mark.formats) for case in MORE_FAMILIES)]
)
def test_eight_bits_of_every_family_are_nearly_exact(case: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny(case)
    made = make(Recipe("gptq", 8, -1), model, tmp_path / "made", held_out=HELD_OUT)
    check(made, model, most=1e-2)
    assert all(step.error < 1e-3 for step in made.progress)


@pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(method, case, marks=[] if case in cases else [pytest.mark.formats])
        for method, cases in FOLDED.items()
        for case in itertools.chain(*FOLDED.values())
    ],
)
def test_scales_that_move_change_nothing_else(
    case: str, method: str, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 bits what is left is rounding: a scale that reached the wrong channel would be seen at once."""
    monkeypatch.setattr("server.quantize.channel_scales.POWERS", 4)
    model = tiny(case)
    recipe = Recipe(method, 8, -1 if method == "awq" else 128, smooth=0.0 if method == "awq" else 0.5)
    made = make(recipe, model, tmp_path / "made", held_out=HELD_OUT)
    # Of experts and recurrences, inputs in int8 alone, without scales, cost 0.02 and 0.04.
    check(made, model, most=6e-2 if method == "w8a8" and case in ("deepseek_v3", "qwen3_next") else 2e-2)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, made.folder))
    changed = [n for n in before if n in after and ("norm" in n or "ln_" in n) and not torch.equal(before[n], after[n])]
    assert changed, "no scale moved"


def test_gates_of_attention_read_what_scales_leave(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    make(Recipe("w8a8", 8, 128, smooth=0.5), tiny("afmoe"), tmp_path / "made", held_out=HELD_OUT)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny("afmoe"), tmp_path / "made"))
    norm, gate = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.gate_proj.weight"
    assert not torch.allclose(before[norm], after[norm], rtol=0.1)
    torch.testing.assert_close(before[norm] * before[gate], after[norm] * after[gate])


@pytest.mark.parametrize(("bits", "layout"), [(2, "gptq"), (3, "gptq"), (4, "pack-quantized")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_few_bits_are_read_as_they_were_made(
    bits: int, layout: str, symmetric: bool, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny("bloom")
    made = make(Recipe("gptq", bits, 32, symmetric), model, tmp_path / "made", held_out=HELD_OUT)
    assert made.outcome.perplexity.after == pytest.approx(Served(made.folder).perplexity(HELD_OUT), rel=1e-3)
    quantised = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    assert layout == quantised.get("format", quantised["quant_method"])
    with safe_open(made.folder / "model.safetensors", framework="pt") as file:
        names = {name.rsplit(".", 1)[-1] for name in file.keys() if ".dense." in name}
    expected = {"bias", "qweight", "qzeros", "scales", "g_idx"}
    if layout != "gptq":
        expected = {"bias", "weight_packed", "weight_scale", "weight_shape"} | (
            set() if symmetric else {"weight_zero_point"}
        )
    assert expected == names


def test_compensated_errors_are_smaller_than_rounded_ones(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.quantize.channel_scales.POWERS", 4)
    model = tiny("llama")
    errors = {}
    for name, recipe in {"gptq": Recipe("gptq", 3, 32), "awq": Recipe("awq", 3, 32)}.items():
        made = make(recipe, model, tmp_path / name, calibration=drawn(16, 48), held_out=HELD_OUT)
        errors[name] = [step.error for step in made.progress if step.place]
    pairs = list(zip(errors["gptq"], errors["awq"], strict=True))
    assert sum(a < b for a, b in pairs) >= 0.9 * len(pairs)


def test_an_expert_that_saw_few_tokens_is_only_rounded(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    def starve(tensors: dict[str, torch.Tensor]) -> None:
        router = tensors["model.layers.1.block_sparse_moe.gate.weight"]
        router[2] = router[0] * 0.999  # never quite as good as expert 0, but for numbers below 0
        router[3] = 0.0

    model = changed(tiny("mixtral"), tmp_path / "model", starve)
    made = make(Recipe("gptq", 4, 32), model, tmp_path / "made", calibration=drawn(1, 24), held_out=HELD_OUT)
    assert any(step.rounded for step in made.progress if step.place in ("up", "down"))
    assert made.outcome.perplexity.after == pytest.approx(Served(made.folder).perplexity(HELD_OUT), rel=1e-3)


def test_inputs_are_summed() -> None:
    x = torch.randn(7, 5)
    inputs = Inputs.of(5, x.device)
    inputs.add(x[:3])
    inputs.add(x[3:])
    torch.testing.assert_close(x.t() @ x / 7, inputs.mean_products)
    scale = torch.rand(5) + 0.5
    divided = Inputs.of(5, x.device)
    divided.add(x / scale)
    torch.testing.assert_close(divided.products, inputs.divided(scale).products)
    torch.testing.assert_close(divided.largest, inputs.divided(scale).largest)


@pytest.mark.parametrize(
    ("case", "recipe", "expected"),
    [
        ("t5", Recipe("gptq", 4, 32), "encoder-decoder"),
        ("gemma4-e", Recipe("gptq", 4, 32), "inputs of their own or share keys and values"),
        ("llama", Recipe("gptq", 4, 40), "--group-size is 40, .* the 64 inputs of .*: give 32 or -1"),
        ("mpt-clipped", Recipe("gptq", 3, 8), "--bits is 3, of which 32 codes .* 72 inputs .*: give --bits 4 or 8"),
        ("gpt_oss", Recipe("gptq", 4, 32), "experts have no names .*: serve it with --quantize int4 or int8"),
        ("llama4", Recipe("gptq", 4, 32), "experts have no names of their own"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused_before_anything_is_made(
    case: str, recipe: Recipe, expected: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=expected):
        make(recipe, tiny(case), tmp_path / "made")
    assert [] == list(tmp_path.iterdir())


def test_what_is_quantised_already_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    make(Recipe("gptq", 4, 32), tiny("llama"), tmp_path / "made")
    with pytest.raises(ValueError, match="quantised already, as compressed-tensors"):
        make(Recipe("gptq", 4, 32), tmp_path / "made", tmp_path / "again")


def test_a_folder_that_is_not_empty_is_kept(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        make(Recipe("gptq", 4, 32), tiny("llama"), tmp_path / "made")
    assert ["mine.txt"] == [path.name for path in (tmp_path / "made").iterdir()]


def test_a_run_that_fails_leaves_nothing(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server.quantize.output_folder.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        make(Recipe("gptq", 4, 32), tiny("llama"), tmp_path / "made")
    assert [] == list(tmp_path.iterdir())


def test_weights_in_several_files_have_an_index(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.quantize.output_folder.SHARD_BYTES", 20_000)
    made = make(Recipe("gptq", 4, 32), tiny("llama"), tmp_path / "made", held_out=HELD_OUT)
    index = json.loads((made.folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in made.folder.glob("*.safetensors"))
    assert len(files) > 2 and set(files) == set(index["weight_map"].values())
    assert f"model-00001-of-{len(files):05}.safetensors" == files[0]
    assert made.outcome.perplexity.after == pytest.approx(Served(made.folder).perplexity(HELD_OUT), rel=1e-3)


@pytest.mark.parametrize("name", ["made.lock", "made.partial", ".made.lock"])
def test_files_beside_the_output_are_kept(name: str, tmp_path: Path) -> None:
    kept = tmp_path / name
    kept.mkdir() if name.endswith("partial") else kept.write_text("mine")
    (tmp_path / "target").write_text("mine")
    (tmp_path / "made.o2.lock").symlink_to(tmp_path / "target")
    with output_folder(tmp_path / "made") as folder:
        folder.add({"a": torch.ones(1)})
        folder.complete({}, {})
    assert kept.exists() and "mine" == (tmp_path / "target").read_text()
    assert kept.is_dir() or "mine" == kept.read_text()
    assert {"config.json", "model.safetensors"} == {path.name for path in (tmp_path / "made").iterdir()}


@pytest.mark.parametrize("kind", ["folder", "link", "file", "linked marker"])
def test_a_partial_folder_of_another_program_is_refused_and_kept(kind: str, tmp_path: Path) -> None:
    other, partial = tmp_path / "other", partial_of(tmp_path / "made")
    other.mkdir()
    (other / "mine").write_text("mine")
    if kind == "file":
        partial.write_text("mine")
    elif kind == "link":
        partial.symlink_to(other)
    else:
        partial.mkdir()
        (partial / "mine").write_text("mine")
        if kind == "linked marker":
            (partial / MARKER).symlink_to(other / "mine")
    with pytest.raises(ValueError, match="is not of this command: remove it"), output_folder(tmp_path / "made"):
        pytest.fail("it was taken")
    assert "mine" == (partial if kind == "file" else partial / "mine").read_text()
    assert "mine" == (other / "mine").read_text()


def test_a_run_that_was_killed_is_made_up_for_and_one_that_runs_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "made"
    partial_of(target).mkdir()
    (partial_of(target) / MARKER).touch()
    (partial_of(target) / "1.safetensors").write_text("half")
    with output_folder(target) as folder:
        assert [MARKER] == [path.name for path in partial_of(target).iterdir()]
        with pytest.raises(ValueError, match="made by another run: give another folder"), output_folder(target):
            pytest.fail("it was taken")
        folder.add({"a": torch.ones(1)})
        folder.complete({}, {})
    assert [target] == list(tmp_path.iterdir()) and (target / "config.json").is_file()


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path / "made")
    with pytest.raises(ValueError, match="where a disk is mounted"), output_folder(tmp_path / "made"):
        pytest.fail("it was taken")
    assert [] == list(tmp_path.iterdir())


def test_a_folder_of_the_same_disk_that_is_mounted_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mount --bind`, which looks like any other folder until it is to be renamed."""
    target = tmp_path / "what is made"
    listed = str(target).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"22 1 8:1 / / rw - ext4 /dev/a rw\n23 22 8:1 /x {listed} rw - ext4 /dev/a rw\n")
    monkeypatch.setattr("server.quantize.recipe.MOUNTS", tmp_path / "mounts")
    assert output_problem(tmp_path / "what") is None
    with pytest.raises(ValueError, match="where a disk is mounted"), output_folder(target):
        pytest.fail("it was taken")
    assert ["mounts"] == [path.name for path in tmp_path.iterdir()]


def test_scales_that_move_leave_numbers_that_float16_has(tmp_path: Path) -> None:
    """Each is as near to what was wished as lets what it divides be a number, and no channel is lost."""
    norm = torch.tensor([1e-4, 6e4, 1.0, 0.0, -2.0]).half()
    router = torch.tensor([[1.0, 1.0, 6e4, 1.0, 1.0]]).half()
    save_file({"norm.weight": norm, "router.weight": router}, tmp_path / "model.safetensors")
    checkpoint, made = EditedCheckpoint(tmp_path), FinishedFormat(torch.float16)
    wished = torch.tensor([10.0, 0.5, 2.0, 1e-3, 4.0])
    origin = Origin(("up",), ("norm.weight",), readers=("router.weight",))
    scale = within(origin, wished, checkpoint, made)
    assert [1e-4 / 2**-14, 6e4 / 65504, 65504 / 6e4, 1e-3, 4.0] == pytest.approx(scale.tolist(), rel=1e-2)
    divide(origin, scale, checkpoint, made)
    for name, before in {"norm.weight": norm, "router.weight": router}.items():
        assert checkpoint.changed[name].isfinite().all()
        assert torch.equal(before == 0, checkpoint.changed[name] == 0)
    groups = torch.zeros(4, dtype=torch.int64)
    scales = torch.tensor([1e-3, 2.0, 1e-3]).half().float()[:, None]
    made.weights["v"] = QuantisedWeight(torch.zeros(3, 4, dtype=torch.uint8), 4, scales, groups)
    origin = Origin(("attention_out",), matrix="v", rows=torch.tensor([1, 2]))
    scale = within(origin, torch.tensor([1e-5, 1e3]), checkpoint, made)
    divide(origin, scale, checkpoint, made)
    assert [1e-3, 65504.0, 2**-14] == pytest.approx(made.weights["v"].scale.flatten().tolist(), rel=1e-2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_pass_that_only_measures_is_told_too(is_terminal: bool) -> None:
    stream = io.StringIO()
    bar = Bar(stream, is_live=is_terminal)
    bar(Progress(0, 2))
    bar(Progress(1, 2))
    for number, place in enumerate(PLACES, 1):
        bar(Progress(0, 2, place, 0.01, share=number / len(PLACES)))
    end = "\x1b[K" if is_terminal else "\n"
    lines = stream.getvalue().split(end)
    assert lines[0].endswith("measuring the model as it is: layer 1 of 2")
    assert lines[1].endswith("measuring the model as it is: layer 2 of 2")
    left = ", 0 s left" if is_terminal else " done after 0 s"
    assert f"layer 1 of 2{left}; square error of outputs: " in lines[-2]
    assert (2 + len(PLACES) if is_terminal else 3) == len(lines) - 1


def test_a_line_is_cut_where_the_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    stream = io.StringIO()
    Bar(stream, is_live=True)(Progress(0, 2))
    (line,) = stream.getvalue().removeprefix("\r").split("\x1b[K")[:-1]
    assert 49 == len(line) and line.endswith(" measuring the model as …")


def test_a_perplexity_has_the_decimals_that_say_something() -> None:
    assert ["12.3457", "49021", "inf"] == [command._figure(number) for number in (12.345678, 49021.3445, float("inf"))]


@pytest.mark.parametrize("recipe", [Recipe("gptq", 4, 32), Recipe("awq", 4, 32), Recipe("w8a8", 8)])
def test_weights_that_are_not_finite_are_refused(recipe: Recipe, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = changed(tiny("llama"), tmp_path / "model", with_number("model.layers.1.mlp.up_proj.weight", math.nan))
    with pytest.raises(ValueError, match=r"not finite|not a number"):
        make(recipe, model, tmp_path / "made", held_out=HELD_OUT)
    assert [model] == list(tmp_path.iterdir())


def test_what_ends_a_run_is_told_before_its_long_part(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quantiser, "_quantise", lambda *_: pytest.fail("a matrix was quantised"))
    model = changed(tiny("llama"), tmp_path / "nan", with_number("model.norm.weight", math.nan))
    with pytest.raises(ValueError, match="perplexity of the model as it is is nan"):
        make(Recipe("gptq", 4, 32), model, tmp_path / "made")
    more = {"model.layers.0.mlp.unknown.weight": torch.ones(4, 4)}
    model = changed(tiny("llama"), tmp_path / "more", lambda tensors: tensors.update(more))
    with pytest.raises(ValueError, match=r"tensors that this architecture does not use: model.layers.0.mlp.unknown"):
        make(Recipe("gptq", 4, 32), model, tmp_path / "made")
    with pytest.raises(ValueError, match="makes token 103 of the text, and the model knows 0 to 102"):
        make(Recipe("gptq", 4, 32), tiny("llama"), tmp_path / "made", held_out=((5, 103), (5, 6)))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(ValueError, match=r"has 0.0 MB free but 0.\d MB are needed for what is made: make room"):
        make(Recipe("gptq", 4, 32), tiny("llama"), tmp_path / "made")
    assert {"nan", "more"} == {path.name for path in tmp_path.iterdir()}


def test_room_for_what_is_made_is_foreseen(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr("server.quantize.output_folder.need_space", lambda _, count, __: needed.append(count))
    made = make(Recipe("gptq", 8, -1), tiny("llama"), tmp_path / "made")
    assert 0.75 * made.outcome.bytes_after < needed[0] < made.outcome.bytes_after


def test_a_loss_beyond_every_perplexity_is_told_as_infinite(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = changed(tiny("llama"), tmp_path / "model", lambda tensors: tensors["model.norm.weight"].mul_(1e6))
    assert math.inf == make(Recipe("w8a8", 8), model, tmp_path / "made").outcome.perplexity.before
