"""Runs what others wrote to test servers: `python -m tests.suites [NAME …]`, which is `make test-suites`."""

from __future__ import annotations

import argparse
import sys

from tests.suites.schemas import all_are_valid
from tests.suites.servers import SUITES, all_are_known


def main() -> int:
    """Returns 0 if every schema is kept to, and nothing fails but what is known."""
    parser = argparse.ArgumentParser(prog="tests.suites", description=__doc__)
    names = ("schemas", *SUITES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all if none is given")
    asked = parser.parse_args().names or [*names]
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"there is no suite {unknown[0]}: {', '.join(names)}")
    passed = "schemas" not in asked or all_are_valid()
    of_servers = [name for name in asked if name in SUITES]
    return 0 if (not of_servers or all_are_known(of_servers)) and passed else 1


if __name__ == "__main__":
    sys.exit(main())
