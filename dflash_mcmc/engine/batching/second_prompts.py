"""Other prompts of the rows of an engine: the companion is then the target itself, under another prompt.

A second prompt ends at the position at which the first one ends, so that the tokens of an answer have the same positions in
both caches, and rows are copied, exchanged and freed alike. The positions before a shorter prompt hold tokens that no later
token attends to. The model is given positions that count from the start of the second prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch


class Beside(NamedTuple):
    """What the companion is fed in a forward of the target.

    Attributes:
        tokens: int64 (rows, queries).
        skipped: int64 (rows,), positions before the second prompt of each row.
    """

    tokens: torch.Tensor
    skipped: torch.Tensor


class SecondPrompts:
    """The second prompts of all rows.

    Args:
        prompts: second prompts, int64 (n,), by the bytes of the first ones, which are as long or longer and end in the same
            token.
    """

    def __init__(self, prompts: Mapping[bytes, np.ndarray], num_rows: int, device: torch.device):
        self._prompts = prompts
        self._skipped = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def begin(self, row: int, prompt: np.ndarray) -> None:
        """Notes the prompt of an operation that begins in a row."""
        self._skipped[row] = len(prompt) - len(self._prompts[prompt.tobytes()])

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        self._skipped[[a, b]] = self._skipped[[b, a]]

    def of_step(self, rows: slice | torch.Tensor, tokens: torch.Tensor) -> Beside:
        """For a step, which feeds the prompt's last token and later ones: the same tokens."""
        return Beside(tokens, self._skipped[rows])

    def of_spans(self, prompts: Sequence[np.ndarray], first: np.ndarray, tokens: np.ndarray) -> Beside:
        """For pieces that begin at positions `first`, int64 (rows,), of sequences with these first prompts."""
        fed, skipped = tokens.copy(), np.zeros(len(prompts), np.int64)
        for row, prompt in enumerate(prompts):
            second = self._prompts[prompt.tobytes()]
            skipped[row] = len(prompt) - len(second)
            at = np.arange(first[row], first[row] + tokens.shape[1])
            inside = (at >= skipped[row]) & (at < len(prompt))
            fed[row, inside] = second[at[inside] - skipped[row]]
        device = self._skipped.device
        return Beside(torch.from_numpy(fed).to(device), torch.from_numpy(skipped).to(device))
