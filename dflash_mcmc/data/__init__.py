"""What is read from outside: checkpoints, hub files, rows of datasets, prompts."""
