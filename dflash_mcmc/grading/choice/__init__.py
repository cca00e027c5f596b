"""Grading of multiple-choice answers."""
