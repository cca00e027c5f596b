"""Graders: text and gold answer to a verdict."""
