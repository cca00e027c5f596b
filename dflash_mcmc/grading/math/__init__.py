"""Grading of mathematical answers: parse both answers, then compare by typed rules."""
