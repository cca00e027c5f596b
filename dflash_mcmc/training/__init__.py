"""Training: of the embedded target, and of DFlash drafts for any target. Runs stop anywhere and end in the same weights."""
