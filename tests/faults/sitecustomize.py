"""For tests: put this folder on PYTHONPATH, and servers can meet faults, say what they are told, and guess as told.

LOCKSTEP_TEST_FAULT names a file that says `RANK KIND`. The rank that it names meets the fault in its next step, once:
whoever does removes the file. KIND is `raise`, or the seconds for which the step sleeps. SIGUSR2 makes the router
collect its garbage and give free memory back to the system.

LOCKSTEP_TEST_ANSWERS names a JSON file with prompts and answers, pairs of token ids: shards compute what they always
do, and then tell these tokens. LOCKSTEP_TEST_GUESSES names a file with the number of guesses that each sequence gets in
each step, as far as it has any and whatever they cost, or `auto`; where it is a number, a speculative model is asked
in each step. Where LOCKSTEP_TEST_KEEPS_PRIORITY is set, the processes that the router starts, for chats and grammars,
keep its priority. Python imports this module by its name at every start.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any


def _install(path: Path) -> None:
    engine: Any = sys.modules["server.stepping.engine"].Engine
    launch = engine.launch

    def with_fault(self: Any, request: Any) -> Any:
        try:
            number, kind = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return launch(self, request)
        if int(number) == self.shard.rank:
            path.unlink()
            if kind == "raise":
                raise RuntimeError("a tile was lost")
            time.sleep(float(kind))
        return launch(self, request)

    engine.launch = with_fault


def _tell(path: Path) -> None:
    """Of a step's tokens, those that count are replaced before anybody compares them with guesses."""
    engine: Any = sys.modules["server.stepping.engine"]
    answers = {tuple(prompt): answer for prompt, answer in json.loads(path.read_text())}
    came = engine._came

    def told(runs: Sequence[Any], token_ids: list[int]) -> Any:
        rows = iter(range(len(token_ids)))
        for run in runs:
            prompt = run.sequence.prompt[: run.sequence.prompt_length]
            first = run.start + run.length - len(run.guesses) - len(prompt)
            for place, row in zip(range(first, first + 1 + len(run.guesses)), rows, strict=False):
                answer = answers.get(tuple(prompt), ())
                token_ids[row] = answer[place] if place < len(answer) else token_ids[row]
        return came(runs, token_ids)

    engine._came = told


def _guess(path: Path) -> None:
    """Where a number is told, no guess is too unlikely and none too dear."""
    from router.drafting.speculation import Asking, Speculation

    choose, may_pay, ask = Speculation.choose, Speculation.may_pay, Speculation.ask

    def chosen(self: Any, candidates: Any, *args: Any) -> list[tuple[int, ...]]:
        if (told := path.read_text()) == "auto":
            return choose(self, candidates, *args)
        found = []
        for drafting, most, is_under_way in candidates:
            num = min(int(told), most, drafting.most)
            found.append(drafting.guess(num + is_under_way).token_ids[is_under_way:] if num > 0 else ())
        return found

    def asked(self: Any, candidates: Any, **options: Any) -> Asking:
        if path.read_text() == "auto":
            return ask(self, candidates, **options)
        places = [place for place, one in enumerate(candidates) if min(one.most, one.drafting.most) > 0]
        return Asking(self.most_proposals, places) if places else Asking()

    Speculation.choose = chosen  # type: ignore[method-assign]
    Speculation.ask = asked  # type: ignore[method-assign]
    Speculation.may_pay = lambda self, batch: path.read_text() != "auto" or may_pay(self, batch)  # type: ignore[method-assign]


def _give_back(*_: object) -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _keep_priority() -> None:
    from host import process

    process.lower_priority = lambda niceness: None


if os.environ.get("LOCKSTEP_TEST_KEEPS_PRIORITY") and {"router.sandbox", "router.grammars"} & {*sys.orig_argv}:
    _keep_priority()
if "router" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, _give_back)
    if "LOCKSTEP_TEST_GUESSES" in os.environ:
        _guess(Path(os.environ["LOCKSTEP_TEST_GUESSES"]))
for name, install in (("LOCKSTEP_TEST_FAULT", _install), ("LOCKSTEP_TEST_ANSWERS", _tell)):
    if "server.fork_server" in sys.orig_argv and name in os.environ:
        os.register_at_fork(after_in_child=partial(install, Path(os.environ[name])))
