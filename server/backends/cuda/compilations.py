# mypy: disable-error-code="import-untyped, import-not-found"
"""How many kernels Triton has compiled in this process.

A kernel is compiled at the first launch of its kind, for seconds, in which a step takes as long. Who watches the steps
tells that from a hang by this count.
"""

from __future__ import annotations

import logging
from typing import Any

from triton import knobs

MICROSECONDS = 1e-6

log = logging.getLogger(__name__)


class Compilations:
    """The count, from when it is made. Triton tells the latest one alone."""

    def __init__(self) -> None:
        self.count = 0
        knobs.compilation.listener = self._compiled

    def _compiled(self, *, src: Any, times: Any, **about: Any) -> None:
        self.count += 1
        log.debug("compiled the kernel %s in %.1f s", src.name, times.total * MICROSECONDS)
