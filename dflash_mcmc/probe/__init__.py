"""What is measured in place of drawing samples: why a method works. What a probe is: `dflash_mcmc.run.probing`."""
