"""Agents for coding as people have them, from npm: `make test-agents`."""
