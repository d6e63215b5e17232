#!/opt/lockstep/bin/python -I
"""The program of the image that stands in for TGI's: `text-generation-launcher`, on SageMaker and Vertex AI too."""

from __future__ import annotations

import os
import sys

from launch.compatibility.platforms import arguments

if __name__ == "__main__":
    try:
        words = arguments(sys.argv[1:], os.environ)
    except ValueError as error:
        sys.exit(f"error: {error}")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "launcher", *words])
