"""Decoders: how draws are carried out, token by token or block by block with a draft."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.components import Component
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.ops import LARGEST, SMALLEST
from dflash_mcmc.registry import name_of, options_with

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.plan import DraftSize
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.speculation import BlockLengths, Speculation, TokenTree

_NEED_SAMPLED_DRAFTS = ("argmax_proposal", "residual_by_draft_noise", "unprocessed_draft")
"""Faults that change nothing where the draft's tokens are not sampled."""
_OF_TREES = ("tree_rejection",)
"""Faults of several candidates."""


class Decoder(Component):
    """Base class of decoders. A subclass defines `speculation`. A decoder with `is_null` decodes token by token."""

    __slots__ = ()

    group = "decoder"

    @abstractmethod
    def speculation(self, drafter: Drafter | None) -> Speculation | None:
        """The rule by which an engine verifies drafted blocks; None for decoding token by token."""

    def tree_size(self) -> int | None:
        """Drafted tokens of a tree; None without one."""
        return None

    def keeps_tokens(self) -> bool:
        """Whether the tokens are those of plain decoding with the same seed, whatever the draft proposes."""
        return False


def check_plain(config: Config, user: str) -> None:
    """Checks that the decoder decodes token by token. Raises ConfigError.

    Args:
        user: the option that needs it, and why, for the error.
    """
    if not config.decoder.is_null:
        plain = options_with("decoder", "is_null")
        raise ConfigError("decoder", name_of(config.decoder), f"{plain} with {user}")


_MOST = 1024
"""Drafted tokens of a tree, at most."""


@dataclass(kw_only=True)
class SpeculativeDecoder(Decoder):
    """Base class of decoders that verify the blocks of a draft. A subclass declares `draft_temperature` and `fault`."""

    __slots__ = ()

    needs_draft = True

    candidates: list[int] | None = identity(
        None, "numbers of candidates: after the last token, then after each of them, breadth first; [4] = four for the next "
        "token, [3,2,1] = a tree; null drafts a chain", ge=0, le=64, off=None)
    adaptive: float | None = identity(
        None, "cost of a whole block in plain steps, the break-even of `drafts speed`: a block drafts fewer tokens, or none, "
        "where earlier blocks of the draw have kept few; null drafts whole blocks", ge=1, le=1000, off=None)
    trace: bool = runtime(False, "record the outcome of every block, position by position")

    if TYPE_CHECKING:
        @property
        def draft_temperature(self) -> float | None: ...
        @property
        def fault(self) -> str | None: ...

    def tree(self) -> TokenTree | None:
        """The shape of a block; None for a chain."""
        from dflash_mcmc.engine.speculative.speculation import TokenTree

        return None if self.candidates is None else TokenTree(tuple(self.candidates))

    def tree_size(self) -> int | None:
        """See `Decoder.tree_size`."""
        return None if self.candidates is None else sum(self.candidates)

    def fits(self, draft: Drafter | DraftSize | None) -> None:
        """Checks that a tree is no longer than the blocks of the draft. Raises ConfigError."""
        tree = self.tree()
        if draft is not None and tree is not None and tree.depth > draft.num_drafted:
            raise ConfigError("decoder.candidates", self.candidates, f"a tree of at most {draft.num_drafted} tokens in a row, "
                              f"the draft's block (this one has {tree.depth})")

    def _check_candidates(self, config: Config) -> None:
        """Checks a block with several candidates for a place. Raises ConfigError."""
        from dflash_mcmc.engine.speculative.speculation import is_shape

        given, draft = self.candidates, config.draft
        if given is None:
            return
        if not is_shape(given) or sum(given) > _MOST:
            raise ConfigError("decoder.candidates", given, "counts of candidates: after the last token, then after each of "
                              f"them, breadth first, no 0 at the end, {_MOST:,} together at most, such as [4] or [3,2,1]")
        attention = config.hardware.options().attention
        refused = ("a draft that learns (draft.adapt), which does so from chains" if draft.learns() else None,
                   None if self.adaptive is None else "decoder.adaptive, whose blocks are chains",
                   f"sampler={name_of(config.sampler)}, which draws from the draft" if config.sampler.needs_draft else None,
                   f"hardware.attention={attention}" if attention == "flash_attention_2" else None)
        for setting in filter(None, refused):
            raise ConfigError("decoder.candidates", given, f"null with {setting}")
        self.fits(draft.size())

    def check(self, config: Config) -> None:
        """Checks the draft's temperature and the fault, which needs experiment=faults and a setting in which it has an effect.

        Raises ConfigError.
        """
        temperature, fault = self.draft_temperature, self.fault
        self._check_candidates(config)
        if temperature is not None and 0.0 < temperature < SMALLEST:
            raise ConfigError("decoder.draft_temperature", temperature, f"0, or a number from {SMALLEST:g} to {LARGEST:g}")
        if self.adaptive is not None and config.draft.learns():
            raise ConfigError("decoder.adaptive", self.adaptive, "null with a draft that learns (draft.adapt): its earlier "
                              "blocks are those of another draft")
        if fault is None:
            return
        if self.adaptive is not None:
            raise ConfigError("decoder.adaptive", self.adaptive, "null with decoder.fault, whose blocks are whole")
        if config.name != "faults":
            raise ConfigError("decoder.fault", fault, "null; a faulty decoder runs under name=faults alone "
                              "(experiment=faults)")
        if self.candidates is not None and fault not in _OF_TREES:
            raise ConfigError("decoder.candidates", self.candidates, f"null with decoder.fault={fault}")
        if fault in _OF_TREES and (self.candidates is None or max(self.candidates) < 2):
            raise ConfigError("decoder.candidates", self.candidates, f"two or more after a token, such as [3,2,1], with "
                              f"decoder.fault={fault}")
        if fault in _NEED_SAMPLED_DRAFTS and (not config.draft.has_density or self.draft_temperature == 0.0):
            able = options_with("draft", "has_density")
            raise ConfigError("decoder.fault", fault, f"another, or a draft whose tokens are drawn: draft={able}, "
                              "and decoder.draft_temperature not 0")
        if fault == "late_penalty" and not config.sampler.law().has_penalty:
            raise ConfigError("decoder.fault", fault, "another, or a sampler.repetition_penalty that is not 1 (or another "
                              "penalty)")

    def lengths(self, drafter: Drafter | None) -> BlockLengths | None:
        """How many tokens each block drafts; None for whole blocks."""
        from dflash_mcmc.engine.speculative.speculation import block_lengths

        return None if self.adaptive is None or drafter is None else block_lengths(drafter.num_drafted, self.adaptive)

    def canonical(self, config: Config) -> dict[str, object]:
        """Leaves out the draft temperature if no draft token is sampled, because it then has no effect."""
        idle = not config.draft.has_density or config.sampler.is_deterministic
        return {"draft_temperature": None} if idle else {}
