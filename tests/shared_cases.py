"""Data that is kept beside the project: reports of faults, real schemas. Without it, tests skip.

STRUCTGEN_CASES names the folder; by default it is looked for beside the checkout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CASES = Path(os.environ.get("STRUCTGEN_CASES", Path(__file__).parents[2] / "shared" / "cases"))


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file; none where it is not there."""
    path = CASES / name
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
