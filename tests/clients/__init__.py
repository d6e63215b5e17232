"""Clients that want environments of their own: `make test-clients` makes one for each NAME.txt and runs NAME.py."""
