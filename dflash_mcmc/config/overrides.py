"""The text of an override, as it was typed."""

from __future__ import annotations

from hydra.core.override_parser.types import Override


def text_of(override: Override) -> str:
    """The whole override, such as `sampler.alpha=2`. Hydra's parser sets it, though its type allows None."""
    return override.input_line or ""


def given_value(override: Override) -> str:
    """The text after the equals sign."""
    return text_of(override).partition("=")[2]
