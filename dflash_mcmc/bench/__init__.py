"""Measurements of the engine: `python -m dflash_mcmc.bench`. Ratios within one process, since machines are noisy."""
