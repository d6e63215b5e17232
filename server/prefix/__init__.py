"""The prefix cache's tiers behind a device: blocks of keys and values in the host's memory and on disk."""
