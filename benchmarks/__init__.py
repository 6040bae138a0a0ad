"""Benchmarks: structgen paired with its peers. `python -m benchmarks --help`."""
