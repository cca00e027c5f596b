"""Engines run chains. `batched` is fast, `oracle/reference` is simple, and `oracle/tabular` allows enumeration."""
