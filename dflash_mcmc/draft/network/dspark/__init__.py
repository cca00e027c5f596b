"""DSpark drafts (arXiv 2607.05147): a DFlash network, a Markov head that corrects slot by slot, and a confidence head."""
