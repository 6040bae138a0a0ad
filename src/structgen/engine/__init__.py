"""The runtime: one asyncio loop that batches every request over a radix KV cache."""

import os
import sys

# Threads that wait for each other in a product sleep instead of spinning. With another busy
# process on two cores a spinning step took 12 times as long (589 ms against 51), since the thread
# that is waited for is the one that does not get the core. OpenMP reads this once, when torch is
# loaded; who has set it, or loaded torch, has decided already.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
