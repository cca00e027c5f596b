"""Blends: what is mixed into the last hidden state of the target before its head."""
