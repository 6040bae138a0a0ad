"""The runtime: one asyncio loop that batches every request over a radix KV cache."""
