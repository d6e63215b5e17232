"""Tests that others wrote for servers and grammars like these, from their packages' archives: `make test-suites`."""
