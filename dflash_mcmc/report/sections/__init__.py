"""The sections of a report: each module has `section(study)`, which is None where the runs have no data for it."""
