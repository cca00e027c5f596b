"""The run folder: append-only records, locks, attempts. Store failure always stops a run."""
