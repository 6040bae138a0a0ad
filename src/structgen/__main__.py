"""`python -m structgen`: the same as the command `structgen`."""

from __future__ import annotations

import sys

from structgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
