"""The entry point `inspect_ai` of this package: registers the provider, whose code is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inspect_ai.model import modelapi

if TYPE_CHECKING:
    from inspect_ai.model import ModelAPI


@modelapi(name="dflash")
def dflash() -> type[ModelAPI]:
    """The provider of `--model dflash/NAME`."""
    from dflash_mcmc.harness.inspect_ai.provider import DflashAPI

    return DflashAPI
