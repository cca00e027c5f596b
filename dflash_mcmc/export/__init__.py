"""Writes runs in the formats of other programs: `python -m dflash_mcmc.export RUNS... --to inspect`."""
