"""Reports: tables of any set of runs, from their records alone."""
