"""Probes: measurements that explain why a method works, run instead of drawing samples. See `dflash_mcmc.run.probing`."""
