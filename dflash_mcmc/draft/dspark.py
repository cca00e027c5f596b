"""A DSpark checkpoint: a DFlash network whose slots are corrected by the token before."""

from dataclasses import dataclass

from dflash_mcmc.components import register, runtime
from dflash_mcmc.draft import CheckpointDraft


@register("draft", "dspark")
@dataclass(slots=True, kw_only=True)
class DSparkDraft(CheckpointDraft):
    """A DSpark checkpoint (arXiv 2607.05147) of DeepSpec or SpecForge: a folder, or a hub name.

    One forward of the network serves a block. Its tokens are drawn one after another, because the Markov head corrects the
    law of each one by the token before it. The rules take these corrected laws as q.
    """

    path: str = runtime("deepseek-ai/dspark_qwen3_4b_block7", "folder of a checkpoint, or a hub name; its content is part of "
                        "the identity, but its location is not")

    presets = ("tiny_dspark",)
    example = "deepseek-ai/dspark_qwen3_4b_block7"
