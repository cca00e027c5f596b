"""Statistics of runs from their records alone: shares, paired comparisons, several chains a problem, numbers of problems."""
