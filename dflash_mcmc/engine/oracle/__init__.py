"""Slow engines that are obviously right: an enumerable toy model, and plain forwards without a cache."""
