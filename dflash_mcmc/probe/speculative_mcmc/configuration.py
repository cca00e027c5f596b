"""The tables of the document's appendix: sizes of target and draft, and the setting of the run with its elapsed time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_mcmc.probe.speculative_mcmc.columns import Columns
from dflash_mcmc.registry import name_of

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.model.files.sizes import CheckpointSize


def models(target: CheckpointSize, draft: CheckpointSize, block_size: int) -> list[dict]:
    """A row for the target and one for the draft. `block_size` includes the anchor."""
    return [{"role": "target", **target.columns(), "block_size": None},
            {"role": "draft", **draft.columns(), "block_size": block_size}]


def configuration(config: Config, alpha: float, temperatures: Sequence[float], num_samples: int,
                  records: list[dict]) -> list[dict]:
    """The setting and the extent of the run.

    `elapsed_seconds` is the time in which the problems were drawn and measured, without loading the models, summed over
    processes and starts of the run. It is None if a record of an older run has no time.
    """
    columns, seconds = Columns(records), [record.get("seconds") for record in records]
    return [{"dataset": name_of(config.dataset), "problems": len(columns.records),
             "skipped": len(records) - len(columns.records), "blocks": columns.blocks.size, "tokens": columns.tokens.size,
             "max_new_tokens": config.dataset.max_new_tokens, "alpha": alpha,
             "draft_temperatures": ", ".join(f"{temperature:g}" for temperature in temperatures), "samples": num_samples,
             "elapsed_seconds": None if None in seconds else round(sum(filter(None, seconds)), 3)}]
