"""The least times of a race's cells: bytes at the bandwidth of reads, operations at the peak of products in registers.

Floors are those of `benchmark/cost/roofline.py`, for the bytes of weights that a system has stored: other formats of as
many bits store more or fewer. Their operations, keys and values are Lockstep's, which are bfloat16 whatever the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmark.cost.devices import READ_BYTES, Probe
from benchmark.cost.roofline import BytesAndFlops, Ceilings, ServedModel
from benchmark.cost.shapes import NamedShape
from benchmark.race.cells import FORMATS, SERVED, Cell

DTYPE = "bfloat16"


def gauges(threads: int) -> dict[str, Probe]:
    """What measures the ceilings of the CPU, in bfloat16 and in integers, by the numbers that are multiplied with int8.

    Raises BenchError where nothing compiles.
    """
    return {
        kind: Probe("cpu", DTYPE, threads=threads, num_devices=1, step_weight_bytes=READ_BYTES, product_kind=kind)
        for kind in ("int8", "int4")
    }


@dataclass(frozen=True)
class Limits:
    """The floors of cells of these shapes."""

    shapes: Mapping[str, NamedShape]

    def figures(self, cell: Cell, stored_bytes: int | None, ceilings: Ceilings) -> dict[str, float]:
        """What a record says of limits. stored_bytes: of a system's weights; None: as Lockstep has them."""
        prefill, decode = self.needed(cell, stored_bytes)
        seen = {
            "read_gb_per_second": ceilings.bytes_per_second / 1e9,
            "tflop_per_second": ceilings.flops_per_second / 1e12,
            "integer_top_per_second": ceilings.ops_8_per_second / 1e12,
        }
        if cell.kind == SERVED:
            whole = prefill.plus(decode.times(cell.decode_length - 1)).floor_ms(ceilings)
            return {"limit_tokens_per_second": 1000 * cell.batch_size * cell.decode_length / whole, **seen}
        return {"prefill_limit_ms": prefill.floor_ms(ceilings), "decode_limit_ms": decode.floor_ms(ceilings), **seen}

    def needed(self, cell: Cell, stored_bytes: int | None) -> tuple[BytesAndFlops, BytesAndFlops]:
        """What the prefill of a batch needs at least, and a decode step of it."""
        served = self._served(cell)
        prefill = served.prefill(cell.batch_size, cell.prompt_tokens)
        decode = served.mean_decode(cell.batch_size, cell.prompt_tokens, cell.decode_length)
        if stored_bytes is None:
            return prefill, decode
        shape = served.shape
        read = stored_bytes * (shape.step_parameters + shape.head_parameters) / shape.total_parameters
        saved = served.step_weight_bytes() - read
        return replace(prefill, num_bytes=prefill.num_bytes - saved), replace(
            decode, num_bytes=decode.num_bytes - saved
        )

    def product_kind(self, cell: Cell) -> str:
        """Which of `gauges` measures a cell's ceilings."""
        return self._served(cell).product_kind or "int8"

    def _served(self, cell: Cell) -> ServedModel:
        return ServedModel(self.shapes[cell.shape].shape, DTYPE, FORMATS[cell.format].quantize, on_cpu=True)

    def kv_bytes(self, cell: Cell) -> int:
        """Bytes of the keys and values of all sequences of a cell at their ends."""
        each = self.shapes[cell.shape].shape.kv_bytes_per_token(DTYPE)
        return each * cell.batch_size * (cell.prompt_tokens + cell.decode_length)
