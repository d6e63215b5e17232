"""Checkpoints of every family, as the tests of the shards have them."""

from tests.server.conftest import checkpoints

__all__ = ["checkpoints"]
