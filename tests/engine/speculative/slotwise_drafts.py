"""Random DSpark and DFlash 2 networks, and the exact law of their drafts and of the branches of others on a small target."""

from __future__ import annotations

import functools
from typing import cast

import numpy as np
import torch

from dflash_mcmc.draft.network.dflash import SlotwiseNetwork
from dflash_mcmc.draft.network.dflash2 import DFlash2, DFlash2Shape
from dflash_mcmc.draft.network.dspark import DSpark, DSparkShape
from dflash_mcmc.engine.batching.cache import ContiguousCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularModel
from dflash_mcmc.engine.speculative.drafter import Anchors, Drafter, ModelDrafter
from dflash_mcmc.engine.speculative.slotwise import SlotwiseDrafter
from dflash_mcmc.engine.speculative.speculation import TokenTree
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
    heads = dict(markov_rank=0 if kind == "independent" else 6, markov_head="vanilla" if kind == "independent" else kind,
                 confidence=True, confidence_with_markov=kind != "independent")
    return DSparkShape(**{**common, **heads, **changes})


def random_network(shape: DSparkShape | DFlash2Shape, seed: int = 0, sharpness: float = 1.0) -> SlotwiseNetwork:
    """A network whose heads change its laws much."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = DSpark(shape) if isinstance(shape, DSparkShape) else DFlash2(shape)
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.data.add_(torch.rand_like(parameter) - 0.5)
            elif "codebook" in name or "markov" in name or "base_kernel" in name or "confidence" in name:
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


class NetworkDraft(TabularDraft):
    """A `SlotwiseDrafter` as the draft of a tabular engine. Its laws are those that `propose` gives to the engine."""

    def __init__(self, network: SlotwiseNetwork, table: ModelTable, threshold: float = 0.0):
        super().__init__(table.vocab_size, network.shape.num_drafted, sequential=True)
        self._drafter, self._table_of = _ForcedDrafter(network, table.parts, threshold), table
        self.proposed = functools.cache(self._proposed)

    @torch.no_grad()
    def _proposed(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> tuple[np.ndarray, bool]:
        """(logits of the slot after `drafted`, whether it is offered)."""
        self._drafter.prefix = prefix
        found: dict[int, tuple[np.ndarray, bool]] = {}

        def draw(logits: torch.Tensor, first: int, offered: torch.Tensor | None = None) -> torch.Tensor:
            found[first] = logits[0, 0].double().numpy(), offered is None or bool(offered[0])
            return torch.tensor([[drafted[first] if first < len(drafted) else 0]])

        anchors = Anchors(slice(0, 1), cast("object", None), torch.tensor([prefix]), torch.tensor([len(prefix) - 1]), 0)
        self._drafter.propose(anchors, draw)
        return found[len(drafted)]

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return self.proposed(prefix, drafted)[0]

    def offers(self, prefix: tuple[int, ...], drafted: tuple[int, ...], token: int) -> bool:
        return self.proposed(prefix, drafted)[1]


class _ForcedDrafter(SlotwiseDrafter):
    """Reads `prefix` by teacher forcing instead of a cache."""

    prefix: tuple[int, ...] = ()

    def hidden(self, anchors: Anchors) -> torch.Tensor:
        tokens = torch.tensor([self.prefix])
        reading = sequences.read(self.target, tokens, self.tapped_layers)
        return sequences.drafted(self.network, self.target, reading.features(self.target, self.tapped_layers), tokens,
                                 torch.tensor([len(self.prefix)]), torch.tensor([[len(self.prefix) - 1]]))[0]


class BranchDraft(TabularDraft):
    """A drafter of steps or forwards as the draft of a tabular engine: its laws are those of the last branch of a tree."""

    def __init__(self, drafter: Drafter, table: ModelTable):
        super().__init__(table.vocab_size, drafter.num_drafted, sequential=True)
        self._drafter, self._target = drafter, table.parts
        self.slots = functools.cache(self._slots)

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return self.slots(prefix, drafted)[len(drafted)]

    @torch.inference_mode()
    def _slots(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> list[np.ndarray]:
        """Logits after each beginning of `drafted`, with other tokens on the other branches."""
        drafter, length, last, found = self._drafter, 64, len(prefix) - 1, list[np.ndarray]()
        tree = TokenTree((2, 1, 2, 1, 0, 1)[: 3 * (drafter.num_drafted - 1)])
        drafting = None
        if isinstance(drafter, ModelDrafter):
            drafting = ModelRunner(drafter.model, None, "grouped", length, length, 8)
        cache = ContiguousCache(self._target.cache_shape, 1, length, companions=(drafter.companion,))
        runner = ModelRunner(self._target, None, "grouped", length, length, 8, drafter, drafting=drafting)

        def draw(logits: torch.Tensor, depth: int, offered: torch.Tensor | None = None) -> torch.Tensor:
            found.append(logits[0, -1].double().numpy())
            here, token = tree.nodes(depth + 1), drafted[depth] if depth < len(drafted) else 0
            return torch.tensor([[(token + 1) % logits.shape[-1]] * (here.stop - here.start - 1) + [token]])

        def forward(tokens: torch.Tensor, positions: torch.Tensor, read: TokenTree | None = None) -> torch.Tensor:
            return runner.draft_logits(cache, slice(0, 1), tokens, positions, length, read)

        with runner.ready():
            if last:
                runner.read(cache, [Span(0, np.array(prefix), 0, last)])
            at = Anchors(slice(0, 1), cache, torch.tensor([prefix]), torch.tensor([last]), length, forward)
            drafter.propose_tree(at, draw, tree)
        return found


@functools.cache
def small_table() -> ModelTable:
    """A random transformer with three tokens."""
    return ModelTable(random_model("qwen3", sharpness=0.4, vocab_size=3, eos_token_id=0))
