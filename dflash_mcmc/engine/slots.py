"""The engine of this package: a ragged batch of chains over a static cache of slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.engine import Engine
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.interface import ChainRunner
    from dflash_mcmc.engine.batching.language_model import LanguageModel


@register("engine", "slots")
@dataclass(slots=True, kw_only=True)
class Slots(Engine):
    """This package's own engine, for every blend, decoder, draft and probe; the fields of hardware are its options."""

    is_null = True
    mixes_stops = True

    def load(self, config: Config, device: str) -> LanguageModel:
        """The model of transformers. Raises UserError."""
        return config.model.load(device)

    def resource(self, target: LanguageModel) -> object:
        """The model's layers, whose outputs and attention belong to a run."""
        return target.decoder

    def start(self, config: Config, target: LanguageModel, prompt_length: int, num_chains: int) -> ChainRunner:
        """The batched engine with the configured draft, blend and decoder. Raises UserError if the memory does not suffice."""
        from dflash_mcmc.runner import build

        return build.slots_engine(config, target, prompt_length, num_chains)
