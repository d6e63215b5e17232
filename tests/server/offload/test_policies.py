"""What `auto` chooses among. That it is near the best by a disk's clock is measured by `make bench-check`."""

from __future__ import annotations

import pytest

from tests.server.offload import policies


@pytest.mark.parametrize("work", policies.WORKLOADS, ids=lambda work: work.name)
def test_there_is_something_to_choose(work: policies.Workload) -> None:
    every = policies.fitting(work)
    assert len(every) > 30
    assert {"row", "zig-zag", "diagonal", "continuous"} == {name for name, _, _ in every}
    assert max(share for _, _, share in every) < 1.0  # or there would be nothing to weigh
