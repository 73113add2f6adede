"""`python -m millrace` is the `millrace` command."""

from __future__ import annotations

import sys

from millrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
