"""Samplers: generators of `Draw` and `Score` for one chain. Each states the law it samples."""
