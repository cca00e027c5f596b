"""The size of a checkpoint, read from its configuration and from the headers of its weights. No weight is loaded."""

from __future__ import annotations

from typing import NamedTuple

from dflash_mcmc.model.files.checkpoint import Checkpoint


class CheckpointSize(NamedTuple):
    """The size of a target or a draft. A value is None if it is not known without loading the checkpoint."""

    name: str | None = None
    """The hub name, or the name of the folder."""
    parameters: int | None = None
    """Stored parameters; a head that shares the weights of the embedding counts once."""
    hidden_size: int | None = None
    num_layers: int | None = None
    reads_layers: tuple[int, ...] = ()
    """The target's layers that a draft reads."""


def size_of(checkpoint: Checkpoint) -> CheckpointSize:
    """The size of a checkpoint in a folder or in the cache of the hub. Raises ConfigError for a damaged config.json."""
    values, folder = checkpoint.config(), checkpoint.config_folder()
    if values is None or folder is None:
        return CheckpointSize(checkpoint.path)
    name = folder.resolve().name if checkpoint.folder.is_dir() else checkpoint.path
    return CheckpointSize(name, checkpoint.num_parameters(), checkpoint.whole_number("hidden_size", "n_embd"),
                          checkpoint.whole_number("num_hidden_layers", "n_layer"))
