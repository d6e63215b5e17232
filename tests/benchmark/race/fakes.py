"""Programs that stand for the systems of a race: small scripts that print what those print, or fail as they fail."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from benchmark.race.cells import STEPS, Cell, Records, Setup

BATCHED_BENCH = """\
main: n_kv_max = 2048, n_batch = 2048, n_ubatch = 512

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   100 |     10 |    1 |    110 |    0.900 |   111.11 |    0.900 |    11.11 |    1.800 |    61.11 |
|   100 |     10 |    8 |    880 |    2.000 |   400.00 |    0.500 |   160.00 |    2.500 |   352.00 |

llama_print_timings:        load time =     100 ms
"""

BENCH = f"""\
import sys
if "--version" in sys.argv:
    print("version: 1 (fake)", file=sys.stderr)
    sys.exit()
given = dict(zip(sys.argv, sys.argv[1:]))
print('''{BATCHED_BENCH.splitlines()[2]}''')
for batch in given["-npl"].split(","):
    print(f"| {{given['-npp']}} | {{given['-ntg']}} | {{batch}} | 0 | 2.000 | 1.0 | 0.500 | 1.0 | 2.5 | 1.0 |")
with open(__file__ + ".runs", "a") as runs:
    runs.write(given["-npl"] + "\\n")
"""

QUANTIZE = """\
import shutil, sys
if sys.argv[3] == "Q4_K_M":
    print("llama_model_quantize: failed to quantize: tensor cols 5 x 7 are not divisible by 256")
    sys.exit(1)
shutil.copy(sys.argv[1], sys.argv[2])
"""

CONVERTER = """\
import argparse
from pathlib import Path

class TextModel:
    no_mtp = False

    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")

class LlamaModel(TextModel):
    def __init__(self):
        assert self.no_mtp, "the model has no layers that draft"

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--outfile")
    parser.add_argument("--outtype")
    args = parser.parse_args()
    Path(args.outfile).write_text(f"{LlamaModel().get_vocab_base_pre(None)} {args.outtype} of {Path(args.model).name}")
"""


def make_llama_cpp(folder: Path, bench: str = BENCH) -> Path:
    """A folder like that of llama.cpp, built."""
    tools = folder / "build" / "bin"
    tools.mkdir(parents=True)
    for name, program in (("llama-batched-bench", bench), ("llama-quantize", QUANTIZE)):
        (tools / name).write_text(f"#!{sys.executable}\n{program}")
        (tools / name).chmod(0o755)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def make_source(models: Path, shape: str) -> Path:
    """What stands for a model that transformers wrote, so that none is made."""
    folder = models / shape / "transformers"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


SETUP = Setup("a processor", threads=2, runs=1)


def kept(path: Path) -> Records:
    """Records of a race in which every system has the same version."""
    return Records(path, SETUP, defaultdict(lambda: "1"))


def cell(system: str = "llama.cpp", prompt_tokens: int = 100, batch_size: int = 8, **other: object) -> Cell:
    """One that times steps, with ten tokens generated."""
    fields = {"kind": STEPS, "shape": "bloom-560m", "format": "bf16", "decode_length": 10, "round": 1, **other}
    return Cell(system=system, prompt_tokens=prompt_tokens, batch_size=batch_size, **fields)  # type: ignore[arg-type]
