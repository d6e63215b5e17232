"""The compiled functions, loaded and with their parameters declared. What they do is said in the C++ files.

A call costs half a microsecond to one, by the number of its parameters; a step makes some two hundred.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import record_function

from server.backends.cpu.build import BuildError

# A function, and functions by the dtype of the tensors that they take.
Function = Callable[..., None]
Functions = Mapping[torch.dtype, Function]

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Elements that are read, and those that are written.
ELEMENTWISE = {
    "f32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "i64": (torch.int64, torch.int64),
    "f32_to_bf16": (torch.float32, torch.bfloat16),
    "bf16_to_f32": (torch.bfloat16, torch.float32),
}
# Kinds of numbers whose products `peak.cpp` counts.
PEAKS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "int8", "int4": "int4"}
# What the letters of a signature stand for.
PARAMETERS = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int}


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel."""

    name: str  # as a profiler shows it
    packed: int  # address of the function's packed form (vector.h)
    arguments: tuple[int | None, ...]


class Recorder(Protocol):
    """Is told of every call of a kernel, in order."""

    def add_call(self, call: KernelCall) -> None: ...


class Library:
    """A compiled library in this process. Raises BuildError."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the compiled kernels cannot be loaded ({error}): delete {path.parent}") from error

    def address(self, name: str) -> int:
        """The library has a pointer to each function. Raises BuildError where it is another library."""
        try:
            address = ctypes.c_void_p.in_dll(self._library, name).value
        except ValueError as error:
            raise BuildError(f"the compiled kernels are others ({error}): delete {self._path.parent}") from error
        assert address is not None, f"the library exports {name}"
        return address

    def function(self, name: str, signature: str) -> Function:
        """A function by its name, with the letters of its parameters."""
        return ctypes.CFUNCTYPE(None, *(PARAMETERS[letter] for letter in signature))(self.address(name))


class Kernels:
    """Every function of the library, ready to be called with addresses and numbers.

    recorder: notes each call, beside its being made.
    """

    def __init__(self, library: Library):
        self._library = library
        self.recorder: Recorder | None = None
        self.pack = self._by_dtype("pack", "ppli")
        self.unpack = self._by_dtype("unpack", "pplpi")
        self.linear = self._by_dtype("linear", "pplpppipppi")
        self.linear_to_f32 = {
            torch.float32: self.linear[torch.float32],
            torch.bfloat16: self._function("linear_bf16_to_f32", "pplpppipppi"),
        }
        self.grouped = self._by_dtype("grouped", "plppppiplpi")
        self.pack_levels = self._function("pack_levels", "ppppi")
        self.unpack_levels = self._by_dtype("unpack_levels", "pplpi")
        self.pack_codes = self._function("pack_codes", "ppi")
        self.round_int4 = self._function("round_int4", "pplpppi")
        self.pack_words = self._function("pack_words", "ppi")
        self.pack_scales = self._function("pack_scales", "pppi")
        self.unpack_codes = self._by_dtype("unpack_codes", "pplpi")
        self.linear_codes = self._by_dtype("linear_codes", "pplppppipppi")
        self.linear_codes_to_f32 = {
            torch.float32: self.linear_codes[torch.float32],
            torch.bfloat16: self._function("linear_codes_bf16_to_f32", "pplppppipppi"),
        }
        self.grouped_codes = self._by_dtype("grouped_codes", "plppppiplpi")
        self.choose_experts = self._function("choose_experts", "pliiippi")
        self.choose_experts_by_sigmoid = self._function("choose_experts_by_sigmoid", "pplppi")
        self.sort_pairs = self._function("sort_pairs", "pliippp")
        self.gather_rows = self._by_dtype("gather_rows", "ppplli")
        self.weigh_rows = self._by_dtype("weigh_rows", "pppplili")
        self.norm = self._by_dtype("norm", "pppppppli")
        self.norm_heads = self._by_dtype("norm_heads", "pppllli")
        self.elementwise = {
            (a, out): self._function(f"elementwise_{name}", "pppp") for name, (a, out) in ELEMENTWISE.items()
        }
        self.gate = self._by_dtype("gate", "ppllii")
        self.rotate = self._by_dtype("rotate", "plppllllii")
        self.write = self._by_dtype("write", "pplppllpliii")
        self.attend = self._by_dtype("attend", "ppplplpppplpiiiiili")
        self.delta = self._by_dtype("delta", "pppplppppli")
        self.mamba = self._by_dtype("mamba", "ppplppppppli")
        self.short_conv = self._by_dtype("short_conv", "ppplppppli")
        self.summarise = self._function("summarise_logits", "pllllpppi")
        self.race = self._function("race_logits", "pllllppppi")
        # What no recorder is told of: it may be called beside what is recorded, by another thread.
        self.replay: Function = library.function("replay_calls", "pl")
        self.lay_out_change = {d: library.function(f"lay_out_change_{s}", "pplpp") for d, s in SUFFIXES.items()}
        self.fill_change = {d: library.function(f"fill_change_{s}", "plplp") for d, s in SUFFIXES.items()}
        self.sum_ranks: Functions = {d: library.function(f"sum_ranks_{s}", "ppl") for d, s in SUFFIXES.items()}
        self.largest_of_ranks: Functions = {torch.float32: library.function("largest_of_ranks_f32", "ppl")}
        self.gather_ranks = library.function("gather_ranks", "pppl")
        self.broadcast_ranks = library.function("broadcast_ranks", "ppl")
        self._peaks = {kind: library.function(f"peak_{suffix}", "lpi") for kind, suffix in PEAKS.items()}

    def instructions(self, dtype: torch.dtype) -> str:
        """Which instructions compute matrix products of `dtype`, as people call them."""
        texts = (ctypes.c_char * 16 * len(SUFFIXES))()
        self._library.function("instructions", "p")(ctypes.addressof(texts))
        return texts[list(SUFFIXES).index(dtype)].value.decode()

    def operations_per_second(self, kind: str, units: int, threads: int) -> float:
        """Of products of what is in registers, on so many threads at once, for some tens of microseconds a unit.

        kind: of the numbers, float32, float16, bfloat16, or int8 and int4, whose products with int8 are summed up
        exactly. Raises RuntimeError where the system has not so many threads.
        """
        found = (ctypes.c_int64 * 2)()
        self._peaks[kind](units, ctypes.addressof(found), threads)
        operations, nanoseconds = found
        if not nanoseconds:
            raise RuntimeError(f"the system does not give this process {threads} threads")
        return 1e9 * operations / nanoseconds

    def _by_dtype(self, name: str, signature: str) -> Functions:
        return {dtype: self._function(f"{name}_{suffix}", signature) for dtype, suffix in SUFFIXES.items()}

    def _function(self, name: str, signature: str) -> Function:
        """A function whose calls are told to a recorder, and seen by a profiler as it sees torch's operators."""
        function = self._library.function(name, signature)
        packed, shown = self._library.address(f"{name}_packed"), f"lockstep::{name}"

        def call(*arguments: int | None) -> None:
            if self.recorder is not None:
                self.recorder.add_call(KernelCall(shown, packed, arguments))
            if torch._C._autograd._profiler_enabled():
                with record_function(shown):
                    function(*arguments)
            else:
                function(*arguments)

        return call
