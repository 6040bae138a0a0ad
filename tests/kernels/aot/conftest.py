"""Tests that compile kernels: minutes of a compiler, in a pytest process of their own.

A process that interprets kernels cannot compile them, so these are collected only where it is
asked for:

    STRUCTGEN_AOT=1 pytest tests/kernels/aot
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("STRUCTGEN_AOT") == "1" else ["test_*.py"]
