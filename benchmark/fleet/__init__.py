"""Fleets of servers in virtual time: the router's own scheduler, on shards whose steps take what a model says."""
