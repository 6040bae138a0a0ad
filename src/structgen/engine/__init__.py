"""The runtime: one asyncio loop that batches every request over a radix KV cache."""

import os
import sys

# Threads that wait for each other in a product spin for some microseconds and then sleep. GNU
# OpenMP's own default is to spin for milliseconds: on two cores with one other busy process a step
# then took 12 times as long (589 ms against 51), since the thread that is waited for is the one
# that does not get the core. Only sleeping costs a tenth on an idle machine; this costs nothing.
# OpenMP reads it once, when torch is loaded; who has set either, or loaded torch, has decided.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
