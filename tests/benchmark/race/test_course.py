"""A race on its way, with small programs in the systems' place: whatever one of them does, the others are measured."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmark.cost import shapes
from benchmark.cost.devices import DataSheet
from benchmark.cost.roofline import Ceilings
from benchmark.race.cells import SERVED, Cell
from benchmark.race.course import Course, Folders, Settings, answers, stored_bytes
from benchmark.race.limits import Limits
from benchmark.race.systems import Command, Run, Task, Times, finished, last_object, ours
from benchmark.result import BenchError
from benchmark.terminal import Progress, Stage
from tests.benchmark.race.fakes import cell, kept, make_source

GOOD = "print('loading'); print('{\"prefill_ms\": 40.0, \"decode_ms\": 8.0}')"
CEILINGS = Ceilings(50e9, 1e12, ops_8_per_second=2e12)
LIMITS = Limits({"bloom-560m": shapes.find("bloom-560m")})


@dataclass(frozen=True)
class Script:
    """A system whose programs are lines of Python. serves: that of its server, which is told its port."""

    name: str
    program: str = GOOD
    serves: str = ""
    api: str = "openai"
    formats: Mapping[str, str] = field(default_factory=lambda: {"bf16": "bf16", "int8": "int8"})

    @property
    def models_of(self) -> str:
        return self.name

    def version(self) -> Command:
        return Command((sys.executable, "-c", "print(1)"))

    def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
        model = folder / "model.gguf"
        if not model.exists():
            folder.mkdir(parents=True)
            run(Command((sys.executable, "-c", f"open({str(model)!r}, 'wb').write(bytes(10**9 // 1000))")))
        return model

    def steps(self, task: Task) -> Command:
        return Command((sys.executable, "-c", self.program))

    def times(self, printed: str, task: Task) -> Times:
        return dict(last_object(printed))

    def server(self, task: Task) -> Command:
        return ours(*self.serves.split(" ", 2 if self.serves.startswith("-m") else 1), "--port", str(task.port))


def course(tmp_path: Path, *systems: Script, seconds: float = 60.0, keep_models: bool = True) -> Course:
    folders = Folders(tmp_path / "models", tmp_path / "log.txt", {"bloom-560m": "bloom-560m"})
    if not (tmp_path / "models").exists():
        make_source(tmp_path / "models", "bloom-560m")
    records = kept(tmp_path / "race.jsonl")
    settings = Settings(seconds, 1, 2, keep_models=keep_models)
    return Course(systems, records, LIMITS, dict.fromkeys(("int8", "int4"), DataSheet(CEILINGS)), folders, settings)


def found(tmp_path: Path) -> dict[Cell, dict[str, object]]:
    return kept(tmp_path / "race.jsonl").all


def go(race: Course, *cells: Cell) -> None:
    assert list(cells) == list(race.run(cells, Progress([Stage(str(one)) for one in cells])))


def test_whatever_a_system_does_the_others_are_measured(tmp_path: Path) -> None:
    systems = (
        Script("good"),
        Script("hangs", "import time; print('loading', flush=True); time.sleep(600)"),
        Script("crashes", "import os; os.kill(os.getpid(), 4)"),
        Script("refuses", "print('error: BLOOM has a tied head'); print('error: no model'); raise SystemExit(3)"),
        Script("raises", "print('[0]: AttributeError: no cpu_gemm'); print('a user error'); raise SystemExit(1)"),
        Script("is silent", "pass"),
    )
    go(course(tmp_path, *systems, seconds=20.0), *(cell(one.name) for one in systems), cell("hangs", batch_size=32))
    problems = {f"{one.system} {one.batch_size}": record.get("problem") for one, record in found(tmp_path).items()}
    assert {
        "good 8": None,
        "hangs 8": "cut after 20 s",
        "crashes 8": "crashed by SIGILL: ",
        "refuses 8": "failed with 3: error: BLOOM has a tied head",
        "raises 8": "failed with 1: AttributeError: no cpu_gemm",
        "is silent 8": "its output has no line of JSON",
        "hangs 32": "not run: 100 x 8 was cut after 20 s",
    } == problems
    assert {"prefill_ms": 40.0, "decode_ms": 8.0}.items() <= found(tmp_path)[cell("good")].items()


def test_a_cell_has_the_limit_of_what_its_system_has_stored(tmp_path: Path) -> None:
    """BLOOM's head is tied, so a step reads all weights: as many bytes as are stored, and the keys and values."""
    go(course(tmp_path, Script("one")), cell("one", batch_size=1), cell("one", batch_size=1, format="int8"))
    dense, int8 = found(tmp_path).values()
    shape = LIMITS.shapes["bloom-560m"].shape
    kv = shape.kv_bytes_per_token("bfloat16") * (100 + 10 / 2)
    read = 10**6 * (shape.step_parameters + shape.head_parameters) / shape.total_parameters
    assert 1000 * max((read + kv) / 50e9, 2 * (shape.step_parameters + shape.head_parameters) / 1e12) == pytest.approx(
        dense["decode_limit_ms"], rel=0.02
    )
    assert 0.5 == pytest.approx(float(str(int8["decode_limit_ms"])) / float(str(dense["decode_limit_ms"])), rel=0.02)
    assert (50.0, 1.0, 2.0) == tuple(
        dense[name] for name in ("read_gb_per_second", "tflop_per_second", "integer_top_per_second")
    )


def test_integers_are_held_to_the_peak_of_their_bits() -> None:
    kinds = {format: LIMITS.product_kind(cell(format=format)) for format in ("bf16", "int8", "int4", "q4_k_m")}
    assert {"bf16": "int8", "int8": "int8", "int4": "int4", "q4_k_m": "int4"} == kinds


def test_without_stored_bytes_the_limit_is_that_of_lockstep() -> None:
    """The same floor as `plan` computes, in bfloat16 and in int8."""
    for format, num_bytes in (("bf16", 1.118e9), ("int8", 0.561e9)):
        _, decode = LIMITS.needed(cell(batch_size=1, format=format), None)
        assert num_bytes == pytest.approx(decode.num_bytes, rel=0.02)


def test_a_system_that_cannot_make_its_model_says_why(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unable(Script):
        def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
            run(Command((sys.executable, "-c", "raise NotImplementedError('Model BloomForCausalLM is not supported')")))
            raise AssertionError

    cells = (cell("unable"), cell("unable", batch_size=1), cell("good"))
    go(course(tmp_path, Unable("unable"), Script("good")), *cells)
    unable, again, good = found(tmp_path).values()
    problem = "no model: failed with 1: NotImplementedError: Model BloomForCausalLM is not supported"
    assert problem == unable["problem"] == again["problem"] and "problem" not in good
    assert 1 == (tmp_path / "log.txt").read_text().count("\nNotImplementedError"), "it is tried once"


def test_what_a_program_leaves_behind_is_beside_the_log(tmp_path: Path) -> None:
    go(course(tmp_path, Script("one", f"open('llama.log', 'w'); {GOOD}")), cell("one"))
    assert (tmp_path / "llama.log").exists()


def test_a_program_that_is_not_there_costs_its_cell(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Missing(Script):
        def steps(self, task: Task) -> Command:
            return Command(("/nowhere/bench",))

    go(course(tmp_path, Missing("missing")), cell("missing"))
    (record,) = found(tmp_path).values()
    assert "not started: /nowhere/bench: No such file or directory: " == record["problem"]


def test_a_model_that_nobody_wrote_costs_its_cells(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Idle(Script):
        def make_model(self, source: Path, folder: Path, format: str, run: Run) -> Path:
            return finished(folder / "model.partial", folder / "model")

    go(course(tmp_path, Idle("idle")), cell("idle"))
    (record,) = found(tmp_path).values()
    assert record["unmade"] and str(record["problem"]).startswith(
        "no model: its command ended without an error, but wrote no "
    )


def test_a_file_in_the_place_of_a_folder_costs_its_cells(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bloom-560m").write_text("of somebody")
    go(course(tmp_path, Script("one"), keep_models=False), cell("one"), cell("one", batch_size=1))
    first, second = found(tmp_path).values()
    assert str(first["problem"]).startswith("no model: ") and first["problem"] == second["problem"]
    assert "of somebody" == (tmp_path / "models" / "bloom-560m").read_text()


GARBAGE = r"""
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[-1]))) as server:
    while True:
        client, _ = server.accept()
        client.recv(1000)
        client.sendall(b"garbage\r\n\r\n")
        client.close()
"""


def test_a_server_that_speaks_no_http_costs_its_cell(tmp_path: Path) -> None:
    program = tmp_path / "garbage.py"
    program.write_text(GARBAGE)
    go(course(tmp_path, Script("server", serves=f"{program} x")), cell("server", kind=SERVED))
    (record,) = found(tmp_path).values()
    assert str(record["problem"]).startswith("BadStatusLine: garbage")


def test_a_server_is_asked_by_clients_and_ended(tmp_path: Path) -> None:
    system = Script("server", serves="-m tests.benchmark.mock_server")
    folder = make_source(tmp_path / "models", "bloom-560m")
    vocab = {word: id for id, word in enumerate("the of and to in is you that it he".split())}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "the"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    go(course(tmp_path, system), cell("server", kind=SERVED, batch_size=2, prompt_tokens=5))
    (record,) = found(tmp_path).values()
    assert "problem" not in record, record
    assert {"tokens_per_second", "ttft_ms", "gap_ms", "gap_p99_ms", "limit_tokens_per_second"} <= set(record)
    port = re.findall(r"--port (\d+)", (tmp_path / "log.txt").read_text())[0]
    assert not answers(int(port)), "the server is gone"


@pytest.mark.parametrize(
    ("serves", "seconds", "problem"),
    [
        ("-c print('error:\\tunknown\\tmodel')", 120.0, "its server ended: error:\tunknown\tmodel"),
        ("-c __import__('time').sleep(600)", 1.0, "its server was not ready after 1 s"),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path: Path, serves: str, seconds: float, problem: str) -> None:
    go(course(tmp_path, Script("server", serves=serves), seconds=seconds), cell("server", kind=SERVED))
    (record,) = found(tmp_path).values()
    assert problem == record["problem"]


def test_models_that_no_later_cell_needs_can_be_removed(tmp_path: Path) -> None:
    race = course(tmp_path, Script("one"), keep_models=False)
    notes = tmp_path / "models" / "bloom-560m" / "notes"
    notes.mkdir()
    (notes / "mine").write_text("of somebody")
    cells = (cell("one"), cell("one", round=2), cell("one", format="int8"))
    seen = []
    for _ in race.run(cells, Progress([Stage("")] * 3)):
        seen.append(sorted(path.name for path in (tmp_path / "models").rglob("*.*")))
    assert [["model.gguf", "model.safetensors"]] * 3 == seen
    assert ["notes"] == [path.name for path in notes.parent.iterdir()] and "of somebody" == (notes / "mine").read_text()


def test_bytes_are_those_of_weights(tmp_path: Path) -> None:
    for name, size in (("openvino_model.bin", 100), ("openvino_model.xml", 50), ("model-1.safetensors", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    assert 107 == stored_bytes(tmp_path) and 50 == stored_bytes(tmp_path / "openvino_model.xml")


def test_a_disk_that_is_full_ends_the_race(tmp_path: Path) -> None:
    race = course(tmp_path, Script("one"))
    (tmp_path / "race.jsonl").mkdir()
    with pytest.raises(BenchError, match=r"cannot write .*race\.jsonl"):
        list(race.run([cell("one")], Progress([Stage("")])))
