"""Random DSpark and DFlash 2 networks, and the exact law of their drafts and of the branches of others on a small target."""

import functools
from typing import cast

import numpy as np
import torch

from dflash_mcmc.draft.network.dflash import SlotwiseNetwork
from dflash_mcmc.draft.network.dflash2 import DFlash2, DFlash2Shape
from dflash_mcmc.draft.network.dspark import DSpark, DSparkShape
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularModel
from dflash_mcmc.engine.speculative.drafter import Anchors, SlotwiseDrafter
from dflash_mcmc.forcing import sequences
from tests.targets import random_model

KINDS = ("vanilla", "gated", "rnn", "dflash2")


def shape_of(kind: str, model: torch.nn.Module, block_size: int, mask: int, **changes) -> DSparkShape | DFlash2Shape:
    """A small shape of a kind of `KINDS`, or of "independent": DSpark without a Markov head."""
    common = dict(
        hidden_size=model.config.hidden_size, num_layers=2, num_heads=4, num_key_heads=2, head_dim=8, intermediate_size=40,
        block_size=block_size, mask_token_id=mask, target_layers=(0, 2, 1), max_positions=512, sliding=(None, None),
        rope={"rope_type": "default", "rope_theta": 1e4}, vocab_size=model.config.vocab_size)
    if kind == "dflash2":
        selector = dict(kernel_size=2, group_size=4, selector_rank=6, selector_top_k=2)
        return DFlash2Shape(**{**common, **selector, **changes})
    heads = dict(markov_rank=0 if kind == "independent" else 6, markov_head="vanilla" if kind == "independent" else kind)
    return DSparkShape(**{**common, **heads, **changes})


def random_network(shape: DSparkShape | DFlash2Shape, seed: int = 0, sharpness: float = 1.0) -> SlotwiseNetwork:
    """A network whose heads change its laws much."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = DSpark(shape) if isinstance(shape, DSparkShape) else DFlash2(shape)
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.data.add_(torch.rand_like(parameter) - 0.5)
            elif "codebook" in name or "markov" in name or "base_kernel" in name:
                parameter.data.normal_(std=sharpness if "w2" not in name and "successor" not in name else 1.0)
    return network.eval().requires_grad_(False)


class ModelTable(TabularModel):
    """A transformer as the table of a tabular engine."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(model.config.vocab_size, (0,))
        self.parts = LanguageModel(model, stop_ids=(0,))
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    @torch.no_grad()
    def logits(self, prefix: tuple[int, ...], layer: str) -> np.ndarray:
        if prefix not in self._known:
            hidden = sequences.read(self.parts, torch.tensor([prefix])).hidden[0, -1]
            self._known[prefix] = self.parts.logits(hidden).double().numpy()
        return self._known[prefix]


class Forced:
    """A drafter that reads `prefix` by teacher forcing instead of a cache."""

    prefix: tuple[int, ...] = ()

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        tokens = torch.tensor([self.prefix])
        reading = sequences.read(self.target, tokens, self.tapped_layers)
        return sequences.drafted(self.network, self.target, reading.features(self.target, self.tapped_layers), tokens,
                                 torch.tensor([len(self.prefix)]), torch.tensor([[len(self.prefix) - 1]]))[0]


class _ForcedDrafter(Forced, SlotwiseDrafter):
    pass


class NetworkDraft(TabularDraft):
    """A `SlotwiseDrafter` as the draft of a tabular engine. Its laws are those that `propose` gives to the engine."""

    def __init__(self, network: SlotwiseNetwork, table: ModelTable):
        super().__init__(table.vocab_size, network.shape.num_drafted, sequential=True)
        self._drafter, self._table_of = _ForcedDrafter(network, table.parts), table
        self.proposed = functools.cache(self._proposed)

    @torch.no_grad()
    def _proposed(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        """Logits of the slot after `drafted`."""
        self._drafter.prefix = prefix
        found: dict[int, np.ndarray] = {}

        def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
            found[first] = logits[0, 0].double().numpy()
            return torch.tensor([[drafted[first] if first < len(drafted) else 0]])

        anchors = Anchors(slice(0, 1), cast("object", None), torch.tensor([prefix]), torch.tensor([len(prefix) - 1]), 0)
        self._drafter.propose(anchors, draw)
        return found[len(drafted)]

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return self.proposed(prefix, drafted)


@functools.cache
def small_table() -> ModelTable:
    """A random transformer with three tokens."""
    return ModelTable(random_model("qwen3", sharpness=0.4, vocab_size=3, eos_token_id=0))
