"""Statistics of runs, computed from their records alone: accuracies, paired comparisons, several chains, power analysis."""
