"""Checks of a draft: is its acceptance what it should be, and does speculation pay?"""
