"""Training of DFlash drafts for any target.

A run that is stopped and started again ends with the same weights as an uninterrupted one.
"""
