"""Replicas of the server on Ray Serve, and batch jobs on Ray Data. `docs/ray.md` says how to run it."""
