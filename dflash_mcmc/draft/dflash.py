"""A DFlash checkpoint: a small network that reads the target's features and proposes a block of tokens in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.data.checkpoint import Checkpoint
from dflash_mcmc.data.sizes import CheckpointSize, size_of
from dflash_mcmc.draft import Draft
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.inference.language_model import LanguageModel
    from dflash_mcmc.inference.speculative.dflash.network import DFlash
    from dflash_mcmc.inference.speculative.drafter import DFlashDrafter
    from dflash_mcmc.inference.target_shape import DraftSize, TargetShape


@register("draft", "dflash")
@dataclass(slots=True, kw_only=True)
class DFlashDraft(Draft):
    """A DFlash checkpoint (arXiv 2602.06036): a folder, or a name on the hub such as z-lab/Qwen3-4B-DFlash-b16.

    The tokens of a block are drawn independently of each other, given the target's features up to the anchor.
    """

    path: str = runtime("folder of a checkpoint, or a hub name; its content is part of the identity, but its location is not")
    revision: str | None = identity("commit, tag or branch of a hub name; null takes the newest")
    dtype: str = identity("precision of the draft's weights and activations; auto = the checkpoint's own",
                          choices=("auto", "float32", "bfloat16", "float16"))
    block_size: int | None = identity("positions of a block, including its anchor; null takes the number that the draft was "
                                      "trained for, which is also the largest", ge=2)

    presets = ("tiny", "smollm2")
    reads_features = True

    def check(self, config: Config) -> None:
        """Checks that the checkpoint exists and fits the block, without loading it. Raises UserError."""
        self._checkpoint().check()
        if self._checkpoint().folder.is_dir():
            self._shape_for(self._checkpoint().folder)

    def canonical(self, config: Config) -> dict[str, object]:
        """The fields as the identity has them: null and auto are replaced by their actual values.

        `revision` is null, because the identity has the hash of the content.
        """
        values: dict[str, object] = {"revision": None}
        if self._checkpoint().folder.is_dir():
            from dflash_mcmc.inference.speculative.dflash.config import read_shape

            shape = read_shape(self._checkpoint().folder)
            values["block_size"] = self.block_size or shape.block_size
            values["dtype"] = str(shape.dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        return values

    def fingerprint(self) -> str:
        """Hash of the checkpoint's content; see `Checkpoint.fingerprint`."""
        return self._checkpoint().fingerprint()

    def check_target(self, target: TargetShape) -> None:
        """Checks both config.json against each other, and the tensors that a folder has. Raises UserError."""
        from dflash_mcmc.inference.speculative.dflash.checkpoint import check_pair, check_tensors
        from dflash_mcmc.inference.speculative.dflash.config import read_shape

        folder = self._checkpoint().config_folder()
        if folder is None:
            note(f"draft.path: config.json of {self.path} is not in the cache, so that it is not compared with the target's "
                 "before it is loaded")
            return
        self._shape_for(folder)
        check_pair(read_shape(folder), hidden_size=target.config.hidden_size, vocab_size=target.vocab_size,
                   num_layers=target.num_layers)
        if self._checkpoint().folder.is_dir():  # a cache may hold the configuration alone
            check_tensors(folder)

    def size(self) -> DraftSize | None:
        """Block and cache of the draft; None for a hub name that is not in the cache yet. Raises UserError."""
        import torch

        from dflash_mcmc.inference.cache import CacheShape
        from dflash_mcmc.inference.speculative.dflash.config import read_shape
        from dflash_mcmc.inference.target_shape import DraftSize

        folder = self._checkpoint().config_folder()
        if folder is None:
            return None
        shape = read_shape(folder)
        dtype = shape.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        return DraftSize(self._shape_for(folder) - 1,
                         CacheShape(shape.num_layers, shape.num_key_heads, shape.head_dim, shape.head_dim, dtype))

    def checkpoint_size(self) -> CheckpointSize:
        """Parameters without the target's embedding and head, hidden size, layers, and the target's layers that it reads.

        Raises UserError.
        """
        found, folder = size_of(self._checkpoint()), self._checkpoint().config_folder()
        if folder is None:
            return found
        from dflash_mcmc.inference.speculative.dflash.config import read_shape

        return found._replace(reads_layers=tuple(read_shape(folder).target_layers))

    def load(self, target: LanguageModel) -> DFlashDrafter:
        """The draft on its target's device. Raises UserError if draft and target do not fit."""
        from dflash_mcmc.inference.speculative.dflash.checkpoint import check_pair
        from dflash_mcmc.inference.speculative.dflash.config import read_shape
        from dflash_mcmc.inference.speculative.drafter import DFlashDrafter

        folder = self._checkpoint().local()
        block_size = self._shape_for(folder)
        check_pair(read_shape(folder), hidden_size=target.config.hidden_size, vocab_size=target.vocab_size,
                   num_layers=len(target.layers))
        return DFlashDrafter(_load(str(folder), self.dtype, str(target.device)), target, block_size)

    def _shape_for(self, folder: Path) -> int:
        """The block size. Raises UserError for a config that is not a DFlash draft's, and for a block that is too large."""
        from dflash_mcmc.inference.speculative.dflash.config import read_shape

        trained = read_shape(folder).block_size
        if self.block_size is not None and self.block_size > trained:
            raise ConfigError("draft.block_size", self.block_size, f"2 to {trained} (the draft was trained for {trained})")
        return self.block_size or trained

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint("draft.path", self.path, self.revision, "z-lab/Qwen3-4B-DFlash-b16")


@lru_cache(maxsize=1)
def _load(folder: str, dtype: str, device: str) -> DFlash:
    import torch

    from dflash_mcmc.inference.speculative.dflash import checkpoint

    return checkpoint.load(Path(folder), None if dtype == "auto" else getattr(torch, dtype), device)
