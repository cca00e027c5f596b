"""DFlash 2 drafts: a DFlash network with short convolutions, and a selector that rescores the best tokens of each slot."""
