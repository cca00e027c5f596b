"""The run folder: append-only records, locks, attempts. A failure to write always stops a run."""
