"""The heads of DSpark: Markov heads, which correct a slot's logits by the token before it, and the confidence head.

Source: DSpark (arXiv 2607.05147). The names of the tensors are those of the published checkpoints.
"""

from __future__ import annotations

import torch

from dflash_mcmc.draft.network.dspark.shape import DSparkShape


class MarkovHead(torch.nn.Module):
    """The vanilla head: the bias is W2 e, with e = W1[token before the slot]. The other heads change e."""

    def __init__(self, shape: DSparkShape):
        super().__init__()
        self.markov_w1 = torch.nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = torch.nn.Linear(shape.markov_rank, shape.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor,
                state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(bias (rows, vocabulary), state for the next slot); the arguments are those of `SlotwiseNetwork.corrected`."""
        vector, state = self.vector(hidden, self.markov_w1(previous), state)
        return self.markov_w2(vector), state

    def vector(self, hidden: torch.Tensor, embedded: torch.Tensor,
               state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(input of W2 (rows, rank), state for the next slot), from the embedded token before the slot, (rows, rank)."""
        return embedded, None


class GatedHead(MarkovHead):
    """The bias is W2 (g e), with a gate g = sigmoid(G [h; e] + g0)."""

    def __init__(self, shape: DSparkShape):
        super().__init__(shape)
        self.gate_proj = torch.nn.Linear(shape.hidden_size + shape.markov_rank, shape.markov_rank)

    def vector(self, hidden: torch.Tensor, embedded: torch.Tensor,
               state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, None


class RecurrentHead(MarkovHead):
    """The bias is W2 tanh(o). (i, c, o) are the thirds of J [s; e; h] + j0, and the state s starts at zero in every block.

    The next state is sigmoid(i) s + (1 - sigmoid(i)) tanh(c). The bias takes o of the same slot, and not the next state.
    """

    def __init__(self, shape: DSparkShape):
        super().__init__(shape)
        rank = shape.markov_rank
        self.joint_proj = torch.nn.Linear(2 * rank + shape.hidden_size, 3 * rank)

    def vector(self, hidden: torch.Tensor, embedded: torch.Tensor,
               state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.zeros_like(embedded) if state is None else state
        keep, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        return torch.tanh(output), keep * state + (1.0 - keep) * torch.tanh(candidate)


KINDS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead}
"""Classes of `shape.HEADS`."""


class ConfidenceHead(torch.nn.Module):
    """A linear map of [h; e], or of h alone, to the logit of the confidence."""

    def __init__(self, shape: DSparkShape):
        super().__init__()
        self.proj = torch.nn.Linear(shape.hidden_size + shape.confidence_with_markov * shape.markov_rank, 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Float32 (...), from hidden states (..., hidden) and embedded tokens before them (..., rank)."""
        given = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return torch.nn.functional.linear(given.float(), self.proj.weight.float(), self.proj.bias.float())[..., 0]
