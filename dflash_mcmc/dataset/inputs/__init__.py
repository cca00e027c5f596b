"""Inputs from outside: checkpoints, hub files, rows and problems of datasets, prompts."""
