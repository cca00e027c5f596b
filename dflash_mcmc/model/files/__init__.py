"""Files of checkpoints: weights, sizes, stop ids and hashes, read and checked before a library loads them."""
