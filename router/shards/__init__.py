"""The router's side of the shards: the wire, their group, and what they report when they start."""
