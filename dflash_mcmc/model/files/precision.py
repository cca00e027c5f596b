"""The precisions of weights and activations, by their names in configurations."""

from __future__ import annotations

PRECISIONS = ("float32", "bfloat16", "float16")
"""Names of PyTorch's types that models and drafts can be loaded in."""


def name_of(dtype: object) -> str:
    """The name of a type of PyTorch, `bfloat16`, or of the text that a configuration of transformers may have in its place."""
    return str(dtype).removeprefix("torch.")
