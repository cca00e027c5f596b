"""Engines run chains: `batched` is fast, `oracle/reference` is obviously right, `oracle/tabular` enumerates."""
