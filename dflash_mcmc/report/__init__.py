"""Reports: tables, figures and comparisons of any set of runs, computed from their records alone."""
