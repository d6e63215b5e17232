"""What `auto` chooses is near the best of random policies. It takes minutes, and a disk of its own while it runs."""

from __future__ import annotations

import pytest

from tests import offload_policies


@pytest.mark.offload
@pytest.mark.parametrize("work", offload_policies.WORKLOADS, ids=lambda work: work.name)
def test_auto_is_within_a_tenth_of_the_best(work: offload_policies.Workload, tmp_path: object) -> None:
    assert offload_policies.compare(work, str(tmp_path), count=30, seconds=600, seed=0)


@pytest.mark.parametrize("work", offload_policies.WORKLOADS, ids=lambda work: work.name)
def test_there_is_something_to_choose(work: offload_policies.Workload) -> None:
    every = offload_policies.fitting(work)
    assert len(every) > 30
    assert {"row", "zig-zag", "diagonal", "continuous"} == {name for name, _, _ in every}
    assert max(share for _, _, share in every) < 1.0  # or there would be nothing to weigh
