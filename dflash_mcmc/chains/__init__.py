"""The prompts and chains of a configured run, and what they cost."""
