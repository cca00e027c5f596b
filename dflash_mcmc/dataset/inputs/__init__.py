"""Inputs of datasets: rows, problems, conversations and prompts."""
