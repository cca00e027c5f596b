"""The DSpark draft network: DFlash's, in which all rows of a block predict, with a Markov head.

Row k of a block predicts the token k + 1 places after the anchor. The Markov head corrects a slot's logits by the token
before it. The names of the tensors are those of the published checkpoints. The config.json has two published layouts:
DeepSpec writes its own fields at the top level, SpecForge in `dflash_config`. The DFlash baselines of DeepSpec have the
same layout without heads. The confidence head of a checkpoint is not read.

Source: DSpark (arXiv 2607.05147).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dflash_mcmc.draft.network.checkpoint import DraftConfig, Family
from dflash_mcmc.draft.network.dflash import DFlashShape, SlotwiseNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkShape(DFlashShape):
    """The shape of a DSpark draft."""

    vocab_size: int
    """Tokens of the target's head."""
    markov_rank: int = 0
    """Rank of the Markov head; 0 for no head: the slots are then independent, as in DFlash."""
    markov_head: str = "vanilla"
    """One of `HEADS`."""
    from_anchor: bool = True
    """Whether row k of a block predicts the token after its own place, the anchor's row included. Otherwise as in DFlash."""

    @property
    def first_row(self) -> int:
        return 0 if self.from_anchor else 1


_DFLASH = "DFlashDraftModel"
"""A class that has DSpark's layout if `projector_type` says so."""


class DSparkConfig(DraftConfig):
    """The config.json of a DSpark draft."""

    network = "DSpark"
    shape_type = DSparkShape
    speculators = None
    architectures = ("DSparkDraftModel", "Qwen3DSparkModel")
    least_layer = -1
    unread = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    allowed = "DSparkDraftModel or Qwen3DSparkModel, or a draft with projector_type dspark"
    foreign: ClassVar[dict[str, tuple]] = {
        **DraftConfig.foreign, "projector_type": (None, "dspark"), "sample_from_anchor": (None, True, False),
        "dspark_block_size": (None,), "dspark_markov_rank": (None,), "dspark_noise_token_id": (None,),
        "dspark_target_layer_ids": (None,), "rope_is_neox_style": (None, True), "attention_sink_bias": (None, False),
    }

    def fields(self) -> dict[str, Any]:
        rank = self.integer("markov_rank", 0, least=0)
        head = str(self.get("markov_head_type", "vanilla")).lower()
        if rank and head not in HEADS:
            self.refuse(f"has markov_head_type {head!r}", ", ".join(HEADS))
        return {**super().fields(), "vocab_size": self.integer("vocab_size"), "markov_rank": rank, "markov_head": head,
                "from_anchor": self.get("sample_from_anchor", True)}

    def check(self, shape: Any) -> None:
        super().check(shape)
        mode, grouped = self.get("attention_mode"), shape.num_key_heads < shape.num_heads
        if mode not in (None, "gqa" if grouped else "mha"):
            self.refuse(f"has attention_mode {mode!r} with {shape.num_heads} heads and {shape.num_key_heads} key heads",
                        "gqa with fewer key heads than heads, mha with as many")

    def check_architecture(self, names: Any) -> None:
        """Refuses other classes. DFlash's own class is DSpark with `projector_type` dspark."""
        if names == [_DFLASH] and self.get("projector_type") == "dspark":
            return
        super().check_architecture(names or ["a network without a name"])


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


HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead}
"""Kinds of Markov heads."""


class DSpark(SlotwiseNetwork):
    """The network. Its state dict is the published one, without copies of the target's embedding and head."""

    shape: DSparkShape
    markov_head: MarkovHead | None

    def __init__(self, shape: DSparkShape):
        super().__init__(shape)
        self.markov_head = HEADS[shape.markov_head](shape) if shape.markov_rank else None

    def corrected(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor,
                  state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.markov_head is None:
            return base, None
        bias, state = self.markov_head(hidden, previous, state)
        return base + bias.float(), state


FAMILY = Family(DSparkConfig, DSpark, ("logit_head.", ""))
"""Early files of SpecForge have the prefix `logit_head.` before the names of the heads."""
