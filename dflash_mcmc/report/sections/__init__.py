"""The sections of a report. Each module has `section(study)`, which returns None if the runs have no data for it."""
