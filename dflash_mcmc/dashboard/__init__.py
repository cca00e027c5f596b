"""The comparison page in Weights & Biases, made from code: see `launchers/dashboard.py`."""
