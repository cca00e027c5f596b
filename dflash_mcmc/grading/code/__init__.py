"""Grading of programs: tests run in a sandbox."""
