"""`python -m server.native`: compile the kernels now rather than when a server first starts. Never fails: they are
optional, and a server says the same when it does without them."""

from __future__ import annotations

from server.native import load

if __name__ == "__main__":
    kernels, reason = load()
    print(f"CPU kernels: {reason}")
