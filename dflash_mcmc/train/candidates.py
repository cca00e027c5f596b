"""The ids over which the loss of a step normalises, where they are not all ids.

The logits of all ids are most of the work of a step with a real vocabulary: at 49 thousand ids and a draft of 7 million
parameters, three quarters. A step with candidates computes those of some ids: the frequent ids of the training responses, the
ids that occur in the step, and random others that stand for the rest. The sum of exp(logit) over all ids is estimated without
bias, so that the loss of a step is the cross-entropy over all ids plus an error of mean about zero.

Source: sampled softmax (Jean et al. 2015, arXiv 1412.2007, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_mcmc.rng import Key
from dflash_mcmc.train.responses import Response


class Candidates(NamedTuple):
    """The ids of a step.

    Attributes:
        ids: int64 (n,). The first `num_certain` are different and ascending; the others are random, from outside them.
        num_certain: number of ids that stand for themselves.
        log_weight: log of the number of ids that each random one stands for.
    """

    ids: torch.Tensor
    num_certain: int
    log_weight: float

    def to(self, device: torch.device) -> Candidates:
        """The same candidates on another device."""
        return self._replace(ids=self.ids.to(device))

    def places(self, labels: torch.Tensor) -> torch.Tensor:
        """The places of labels, int64 (rows,), in `ids`. All labels must be among the certain ids."""
        return torch.searchsorted(self.ids[: self.num_certain], labels)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Logits (rows, n) of hidden states (rows, width), with `log_weight` added to those of random ids.

        Args:
            weight: (ids, width), the head's. bias: (ids,), or None.
        """
        logits = torch.nn.functional.linear(hidden, weight[self.ids].to(hidden.dtype)).float()
        if bias is not None:
            logits = logits + bias[self.ids]
        shift = torch.zeros(len(self.ids), device=logits.device)
        shift[self.num_certain :] = self.log_weight
        return logits + shift

    def kl_divergences(self, logits: torch.Tensor, target: torch.Tensor, log_sums: torch.Tensor, power: float) -> torch.Tensor:
        """KL(p | q) in nats, shape (n,): an estimate from the candidates, in which p has no error.

        Args:
            logits: (n, candidates), the draft's, as `logits` returns them.
            target: (n, candidates), the target's logits of the candidates. p is softmax(power · target) over all ids.
            log_sums: (n,), log of the sum of exp(power · logit of the target) over all ids.
        """
        shift = torch.zeros(len(self.ids), device=logits.device)
        shift[self.num_certain :] = self.log_weight
        log_p = power * target - log_sums[:, None]
        log_q = torch.log_softmax(logits, dim=-1) - shift
        return ((log_p + shift).exp() * (log_p - log_q)).sum(dim=-1)


class CandidateIds:
    """The candidates of each step. Step n depends only on the responses, the seed and n, so a resumed run has the same ones.

    Args:
        responses: the training responses.
        num: number of candidates beside the ids of the step. Half of them are the most frequent ids of the answers.
        forbidden: bool (ids,), True for ids without a token, which are never candidates.
    """

    def __init__(self, responses: Sequence[Response], num: int, forbidden: np.ndarray, seed: int):
        answers = np.concatenate([response.tokens[response.prompt_length :] for response in responses])
        counts = np.bincount(answers, minlength=len(forbidden))
        counts[forbidden] = 0
        frequent = np.argsort(-counts, kind="stable")[: num // 2]
        self._frequent, self._forbidden = frequent[counts[frequent] > 0], forbidden
        self._num_random = num - num // 2
        self._key = Key(seed).fold_in("draft", "candidates")

    def __call__(self, step: int, tokens: torch.Tensor) -> Candidates:
        """The candidates of a step with these tokens, int64 of any shape. All tokens are certain candidates."""
        certain = np.union1d(self._frequent, tokens.cpu().numpy())
        outside = ~self._forbidden
        outside[certain] = False
        rest = np.flatnonzero(outside)
        if not len(rest):
            return Candidates(torch.from_numpy(certain), len(certain), 0.0)
        drawn = rest[(self._key.fold_in(step).uniforms(0, self._num_random) * len(rest)).astype(np.int64)]
        ids = torch.from_numpy(np.concatenate([certain, drawn]))
        return Candidates(ids, len(certain), float(np.log(len(rest) / self._num_random)))
