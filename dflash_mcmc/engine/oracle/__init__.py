"""Slow and simple engines for tests: an enumerable toy model, and plain forwards without a cache."""
