"""Speculative decoding: a draft proposes a block, one forward of the target verifies it."""
