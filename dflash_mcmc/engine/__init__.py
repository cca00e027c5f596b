"""Engines: they run chains. `batched` is the fast one, `reference` the obviously right one, `tabular` the exact one."""
