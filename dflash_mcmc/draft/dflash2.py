"""A DFlash 2 checkpoint: a DFlash network with short convolutions, and a selector that rescores the best tokens of a slot."""

from dataclasses import dataclass

from dflash_mcmc.components import register
from dflash_mcmc.draft import CheckpointDraft


@register("draft", "dflash2")
@dataclass(slots=True, kw_only=True)
class DFlash2Draft(CheckpointDraft):
    """A DFlash 2 checkpoint: a folder, or a hub name.

    One forward of the network serves a block. Its tokens are drawn one after another: the selector rescores the candidates of
    each slot by the token before it. A token that is no candidate has probability 0 under the draft.
    """

    presets = ("tiny_dflash2",)
    example = "z-lab/Qwen3.8-27B-DFlash2"
