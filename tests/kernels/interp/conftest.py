"""Tests of the Triton kernels in Triton's interpreter: a pytest process of their own.

A kernel is either interpreted or compiled, for the whole process, by what TRITON_INTERPRET says
when its module is imported. So these tests are collected only where it is set from the start:

    TRITON_INTERPRET=1 pytest tests/kernels/interp
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    from tests.kernels.interp.interpreter import prepare

    prepare()
