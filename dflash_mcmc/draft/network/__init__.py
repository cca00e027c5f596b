"""Networks of drafts: their shapes, layers and checkpoints, one format a folder."""
