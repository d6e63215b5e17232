"""The tables of a race, from records that are written down here."""

from __future__ import annotations

from dataclasses import asdict

from benchmark.race.cells import SERVED, STEPS
from benchmark.race.report import race_table
from tests.benchmark.race.fakes import cell


def test_systems_of_as_many_bits_stand_beside_each_other_with_medians_limits_and_ratios() -> None:
    figures = {"prefill_limit_ms": 50.0, "decode_limit_ms": 4.0}
    records = [
        asdict(cell("Lockstep", format="int4", round=n)) | {"prefill_ms": ms, "decode_ms": 5.0} | figures
        for n, ms in ((1, 100.0), (2, 80.0), (3, 90.0))
    ]
    records += [
        asdict(cell("llama.cpp", format="int4")) | {"prefill_ms": 180.0, "decode_ms": 10.0} | figures,
        asdict(cell("llama.cpp", format="q4_k_m")) | {"problem": "failed with 1: a | b"},
        asdict(cell("llama.cpp", format="bf16", batch_size=1)) | {"prefill_ms": 1234.5, "decode_ms": 1.0},
    ]
    assert [
        ["What", "System", "Prefill, ms", "Limit", "% of it", "/ Lockstep's",
         "Decode, ms", "Limit", "% of it", "/ Lockstep's", "Why not"],
        ["bloom-560m, 4 bits, 8 sequences, 100 in, 10 out", "Lockstep int4",
         "90.0", "50.0", "56", "1.00", "5.00", "4.00", "80", "1.00", ""],
        ["", "llama.cpp int4", "180.0", "50.0", "28", "2.00", "10.00", "4.00", "40", "2.00", ""],
        ["", "llama.cpp q4_k_m", *[""] * 8, "failed with 1: a / b"],
        ["bloom-560m, 16 bits, 1 sequence, 100 in, 10 out", "llama.cpp bf16",
         "1,234.5", "", "", "", "1.00", "", "", "", ""],
    ] == cells(race_table(STEPS, records))  # fmt: skip


def test_of_servers_more_tokens_are_nearer_to_the_limit() -> None:
    figures = {"ttft_ms": 300.0, "gap_ms": 20.0, "gap_p99_ms": 90.0, "limit_tokens_per_second": 100.0}
    records = [
        asdict(cell(name, kind=SERVED)) | figures | {"tokens_per_second": rate}
        for name, rate in (("Lockstep (avx2)", 80.0), ("vLLM", 40.0))
    ]
    _, ours, theirs = cells(race_table(SERVED, records))
    assert ["bloom-560m, 16 bits, 8 clients, 100 in, 10 out", "Lockstep (avx2) bf16", "80.0", "100.0", "80"] == ours[:5]
    assert ["", "vLLM bf16", "40.0", "100.0", "40", "0.50", "300", "1.00"] == theirs[:8]
    assert "" == race_table(STEPS, records)


def cells(table: str) -> list[list[str]]:
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()]
    return [line for line in lines if not line[0].startswith("---")]
