"""Engines run chains. `batched` is fast, and `oracle/tabular` allows enumeration."""
