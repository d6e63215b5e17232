"""Replicas of the server on Ray Serve, and batch jobs on Ray Data. `docs/deploying.md` says how to run it."""
