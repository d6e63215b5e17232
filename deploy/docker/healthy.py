"""Ends with 0 if the server in this container can answer requests, else with 1 and its reason: a HEALTHCHECK."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

SECONDS = 10.0  # less than the HEALTHCHECK's own time-out, which has no reason to give


def check(port: str) -> str | None:
    """What is wrong with the server on that port of this machine, or None."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS):
            return None
    except urllib.error.HTTPError as error:  # its body is a sentence of ours
        return error.read().decode(errors="replace") or str(error)
    except OSError as error:
        return f"no answer from port {port}: {error}"


if __name__ == "__main__":
    sys.exit(check(os.environ.get("PORT") or "3000"))
