"""Experiments on how to sample from a language model at inference time: exact, batched, resumable."""

__version__ = "0.1.0"

from dflash_mcmc.process import bits

bits.keep()
