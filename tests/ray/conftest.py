"""Ray's own modules warn when they are imported, which is nobody's fault here."""

from __future__ import annotations

import warnings
from contextlib import suppress

with warnings.catch_warnings(), suppress(ImportError):
    warnings.simplefilter("ignore")
    import ray.cluster_utils
    import ray.data
    import ray.serve  # noqa: F401
