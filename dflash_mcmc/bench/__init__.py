"""Benchmarks of the engine: `python -m dflash_mcmc.bench`. Ratios are taken within one process, because machines are noisy."""
