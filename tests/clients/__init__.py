"""Clients whose pins conflict with ours: each runs in an environment of its own against a live server.

`make test-clients` makes the environments below `.venv-clients/`, starts the server and runs them all (`__main__.py`).
"""
