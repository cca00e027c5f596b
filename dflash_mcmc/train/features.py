"""What the target says along the training responses, kept in memory so that each response is read once and not in every epoch.

Each response is read alone. Its values then do not depend on the batch in which it occurs first, and a run that was resumed
has the same ones to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.train.blocks import TrainingBlocks


class Known(NamedTuple):
    """What a loss needs of the target along sequences.

    Attributes:
        features: (rows, length, layers · hidden), the draft's features.
        hidden: (rows, length, hidden), after the final norm; None for a loss of tokens alone.
        log_sums: float32 (rows, length), log of the sum of exp(power · logit) over all ids, in nats; None if the loss sums
            over all ids itself.
    """

    features: torch.Tensor
    hidden: torch.Tensor | None = None
    log_sums: torch.Tensor | None = None


class TargetReader:
    """Reads sequences for a loss.

    Args:
        layers: the target's layers that the draft reads.
        power: the power of the target's distribution that the draft learns; None for a loss of tokens alone.
        sums: whether the loss needs the logarithms of sums.
    """

    def __init__(self, model: LanguageModel, layers: tuple[int, ...], power: float | None = None, sums: bool = False):
        self._model, self._layers, self._power, self._sums = model, layers, power, sums

    def __call__(self, tokens: torch.Tensor) -> Known:
        """Reads sequences, int64 (rows, length)."""
        reading = sequences.read(self._model, tokens, self._layers)
        features = reading.features(self._model, self._layers)
        if self._power is None:
            return Known(features)
        return Known(features, reading.hidden, self._log_sums(reading.hidden, self._power) if self._sums else None)

    @torch.no_grad()
    def _log_sums(self, hidden: torch.Tensor, power: float) -> torch.Tensor:
        at_once = sequences.positions_at_once(self._model.vocab_size)
        parts = [(power * self._model.logits(part)).logsumexp(dim=-1) for part in hidden.flatten(0, 1).split(at_once)]
        return torch.cat(parts).view(hidden.shape[:2])


class KeptReader:
    """A reader that keeps what it has read, by the number of the response.

    A response takes length · (layers · hidden) numbers of the model's dtype, and for a loss of distributions
    length · (hidden + 1) more.
    """

    def __init__(self, reader: TargetReader):
        self._reader = reader
        self._kept: dict[int, Known] = {}

    def __call__(self, numbers: Sequence[int], blocks: TrainingBlocks) -> Known:
        """What is known of the responses with these numbers, padded with zeros.

        Args:
            blocks: the responses, in the order of the numbers.
        """
        for row, number in enumerate(numbers):
            if number not in self._kept:
                known = self._reader(blocks.tokens[row : row + 1, : blocks.lengths[row]])
                self._kept[number] = Known._make(None if part is None else part[0] for part in known)
        parts = zip(*(self._kept[number] for number in numbers), strict=True)
        return Known._make(None if part[0] is None else torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True)
                           for part in parts)
