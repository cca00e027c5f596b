"""Decoders: how draws are carried out, token by token or block by block with a draft."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import Component, Settings, options_with, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import LARGEST, SMALLEST

if TYPE_CHECKING:
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.rules import Speculation

_NEED_SAMPLED_DRAFTS = ("argmax_proposal", "residual_by_draft_noise", "unprocessed_draft")
"""Faults that change nothing where the draft's tokens are not sampled."""


class Decoder(Component):
    """Base class of decoders. A subclass defines `speculation`. A decoder with `is_null` decodes token by token."""

    __slots__ = ()

    group = "decoder"

    @abstractmethod
    def speculation(self, drafter: "Drafter | None") -> "Speculation | None":
        """The rule by which an engine verifies drafted blocks; None for decoding token by token."""


@dataclass(kw_only=True)
class SpeculativeDecoder(Decoder):
    """Base class of decoders that verify the blocks of a draft. A subclass declares `draft_temperature` and `fault`."""

    __slots__ = ()

    needs_draft = True

    trace: bool = runtime(False, "record the outcome of every block, position by position")

    if TYPE_CHECKING:
        @property
        def draft_temperature(self) -> float | None: ...
        @property
        def fault(self) -> str | None: ...

    def check(self, config: Settings) -> None:
        """Checks the draft's temperature and the fault, which needs experiment=faults and a setting in which it has an effect.

        Raises ConfigError.
        """
        temperature, fault = self.draft_temperature, self.fault
        if temperature is not None and 0.0 < temperature < SMALLEST:
            raise ConfigError("decoder.draft_temperature", temperature, f"0, or a number from {SMALLEST:g} to {LARGEST:g}")
        if fault is None:
            return
        if config.name != "faults":
            raise ConfigError("decoder.fault", fault, "null; a faulty decoder runs under name=faults alone "
                              "(experiment=faults)")
        if fault in _NEED_SAMPLED_DRAFTS and (not config.draft.has_density or self.draft_temperature == 0.0):
            able = options_with("draft", "has_density")
            raise ConfigError("decoder.fault", fault, f"another, or a draft whose tokens are drawn: draft={able}, "
                              "and decoder.draft_temperature not 0")
        if fault == "late_penalty" and not config.sampler.law().has_penalty:
            raise ConfigError("decoder.fault", fault, "another, or a sampler.repetition_penalty that is not 1 (or another "
                              "penalty)")

    def canonical(self, config: Settings) -> dict[str, object]:
        """Leaves out the draft temperature if no draft token is sampled, because it then has no effect."""
        idle = not config.draft.has_density or config.sampler.is_deterministic
        return {"draft_temperature": None} if idle else {}
