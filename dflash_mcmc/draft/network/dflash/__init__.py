"""The DFlash draft: its network and its checkpoints."""
