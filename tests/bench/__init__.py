"""Benchmarks of the engine: `python -m tests.bench`. Ratios are taken within one process, because machines are noisy."""
