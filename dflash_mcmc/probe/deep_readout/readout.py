"""Measures what a draft extracts from the target's features: probability and rank of an answer's tokens in both models.

The answer is teacher-forced in whole blocks that do not overlap. Slot 0 of a block is known. The draft's prediction for each
later slot is compared with the target's distribution for the same token. A block is drafted in several modes, all in one
masked pass:

- `mask`: as in training. The context is the target's features, and the block is the known token and then masks.
- `gold`: the block holds the tokens to predict. A draft is never trained this way.
- `random`: like `gold`, with Gaussian noise of the same norm instead of the features.
- `reinject`, an option: like `mask`, and every k-th block after the first sees the prompt's features once more, at the
  prompt's positions, in addition to the context of the other modes.

Source: the document `deep_readout_diagnostic`, sections 2.2, 2.3 and 6 ("periodic re-injection of prompt features").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe.deep_readout.tables import MODES, REINJECT, TARGET, ParameterCounts
from dflash_mcmc.rng import Key

_NOISE_VALUES = 2**22
"""Noise values drawn at a time, in float64, to limit memory for long prompts."""


class AnswerBlocks(NamedTuple):
    """Whole blocks of the tokens after a prompt."""

    prompt_length: int
    size: int
    """Number of tokens in a block: the known token and the drafted tokens."""
    anchors: list[int]
    """Positions of the known tokens."""

    @staticmethod
    def of(prompt_length: int, num_tokens: int, size: int) -> AnswerBlocks:
        """The blocks of an answer of `num_tokens` tokens; fewer than `size` tokens at its end are left out."""
        return AnswerBlocks(prompt_length, size, sequences.whole_blocks(prompt_length, num_tokens, size))

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The context that each block has in addition to earlier blocks, as positions (start, stop).

        For the first block it is the prompt, for any other block the previous block.
        """
        return list(zip([0, *self.anchors], self.anchors, strict=False))

    def seen(self, context: str) -> torch.Tensor | None:
        """The context positions that each block may see, bool (blocks, last anchor).

        None means that each block may see all positions before its anchor.

        Args:
            context: one of `tables.CONTEXTS`.
        """
        if context == "full":
            return None
        spans = self.segments if context == "block" else [(0, self.prompt_length)] * len(self.anchors)
        first, end = torch.tensor(spans).T[..., None]
        position = torch.arange(self.anchors[-1])
        return (position >= first) & (position < end)

    def reinjected(self, every: int) -> torch.Tensor:
        """The blocks that see the prompt's features once more, bool (blocks,): every `every`-th block after the first."""
        index = torch.arange(len(self.anchors))
        return (index > 0) & (index % every == 0)


class Hidden(NamedTuple):
    """Hidden states from which the head predicts the compared tokens, and these tokens."""

    target: torch.Tensor
    """(blocks, size - 1, hidden)."""
    draft: torch.Tensor
    """(modes, blocks, size - 1, hidden)."""
    tokens: torch.Tensor
    """int64 (blocks, size - 1)."""


class Readout(NamedTuple):
    """Probabilities and ranks of the compared tokens in their order, by reader: `target` and the modes."""

    p: dict[str, list[float]]
    """Probabilities at temperature 1."""
    rank: dict[str, list[int]]
    """1 + number of tokens with a strictly larger logit."""


@torch.inference_mode()
def hidden_states(drafter: DFlashDrafter, sequence: np.ndarray, blocks: AnswerBlocks, context: str, key: Key,
                  modes: Sequence[str] = MODES, reinject_every: int | None = None) -> Hidden:
    """Hidden states of target and draft for whole blocks, at least one.

    Args:
        sequence: int64, prompt and answer.
        context: see `AnswerBlocks.seen`.
        key: random key of the noise.
        reinject_every: see `AnswerBlocks.reinjected`; needed if `reinject` is one of the modes.
    """
    model, network = drafter.target, drafter.network
    anchors = torch.tensor(blocks.anchors, device=model.device)
    last = blocks.anchors[-1]
    tokens = torch.from_numpy(sequence[: last + blocks.size]).to(model.device)
    windows = tokens.unfold(0, blocks.size, 1)[anchors]  # (blocks, size)
    reading = sequences.read(model, tokens[None], drafter.tapped_layers)
    features = reading.features(model, drafter.tapped_layers)[0, :last].to(drafter.dtype)
    rows = torch.stack([noise(features, blocks.segments, key).to(drafter.dtype) if mode == "random" else features
                        for mode in modes])
    masks = torch.full_like(windows, network.shape.mask_token_id)
    masks[:, 0] = windows[:, 0]
    inputs = torch.stack([masks if mode in ("mask", REINJECT) else windows for mode in modes])
    seen, positions = blocks.seen(context), None
    seen = None if seen is None else seen.to(model.device).expand(len(modes), -1, -1)
    if reinject_every is not None:
        # The context ends with a copy of the prompt's features. Only the mode `reinject` sees it, in its re-injected blocks.
        count, copied = len(modes), blocks.prompt_length
        if seen is None:  # blocks see all positions before them
            seen = torch.ones(count, len(blocks.anchors), last, dtype=torch.bool, device=model.device)
        shown = torch.tensor([mode == REINJECT for mode in modes])[:, None] & blocks.reinjected(reinject_every)
        again = shown.to(model.device)[..., None].expand(-1, -1, copied)
        positions = torch.cat([torch.arange(last), torch.arange(copied)]).to(model.device).expand(count, -1)
        rows, seen = torch.cat([rows, rows[:, :copied]], dim=1), torch.cat([seen, again], dim=-1)
    drafted = sequences.drafted(
        network, model, rows, tokens[:last].expand(len(modes), -1), torch.full((len(modes),), last, device=model.device),
        anchors.expand(len(modes), -1), inputs, seen, positions)
    before = anchors[:, None] + torch.arange(blocks.size - 1, device=model.device)
    return Hidden(reading.hidden[0, before], drafted, windows[:, 1:])


@torch.inference_mode()
def read_out(drafter: DFlashDrafter, hidden: Hidden, modes: Sequence[str] = MODES) -> Readout:
    """Probability and rank of the compared tokens. Logits are computed for a few positions at a time to limit memory.

    Raises NotNumbers.
    """
    tokens, at_once = hidden.tokens.flatten(), sequences.positions_at_once(drafter.target.vocab_size)
    readings = {TARGET: _probabilities_and_ranks(drafter.target.logits, hidden.target.flatten(0, 1), tokens, at_once)}
    for mode, drafted in zip(modes, hidden.draft, strict=True):
        readings[mode] = _probabilities_and_ranks(drafter.logits, drafted.flatten(0, 1), tokens, at_once)
    return Readout({name: p for name, (p, _) in readings.items()}, {name: rank for name, (_, rank) in readings.items()})


def noise(features: torch.Tensor, segments: Sequence[tuple[int, int]], key: Key) -> torch.Tensor:
    """Gaussian noise that replaces features, float32 (length, width). In each segment it has their Frobenius norm.

    Before scaling, the numbers of a position depend only on the key and the position.
    """
    width, drawn = features.shape[1], torch.empty(features.shape, device=features.device)
    at_once = max(1, _NOISE_VALUES // width)
    for start, stop in segments:
        squares = torch.zeros(2, dtype=torch.float64, device=features.device)
        for first in range(start, stop, at_once):
            end = min(first + at_once, stop)
            normal = ndtri(key.uniforms(first * width, end * width)).reshape(-1, width).astype(np.float32)
            drawn[first:end] = torch.from_numpy(normal)
            squares += torch.stack([rows[first:end].double().square().sum() for rows in (features, drawn)])
        norm, norm_of_noise = squares.sqrt()
        drawn[start:stop] *= norm / norm_of_noise
    return drawn


def _probabilities_and_ranks(logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, tokens: torch.Tensor,
                             at_once: int) -> tuple[list[float], list[int]]:
    """Probabilities, to six digits, and ranks of tokens int64 (n,), from the logits of hidden states (n, hidden)."""
    probabilities, ranks = [], []
    for states, labels in zip(hidden.split(at_once), tokens.split(at_once), strict=True):
        logits = logits_of(states)
        log_p = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(dim=-1)
        probabilities += [float(f"{p:.6g}") for p in log_p.exp().tolist()]
        ranks += sequences.ranks(logits, labels).tolist()
    return probabilities, ranks


def count_parameters(model: LanguageModel, network: DFlash) -> ParameterCounts:
    """Parameters by component, and the sizes that the diagram needs, as JSON values.

    `target_other` counts the final norm and all other parameters, such as a table of positions. A tied head is counted in
    `head` too, although it is the embedding.
    """
    embedding, head, shape = model.decoder.get_input_embeddings().weight, model.head, network.shape
    layers, tied = _count([model.layers]), head.weight is embedding
    whole = _count([model.decoder, head])
    head_only = _count([head])
    return {
        "target_layers": layers, "embedding": embedding.numel(), "head": head_only, "tied": tied,
        "target_other": whole - layers - embedding.numel() - (head_only - embedding.numel() if tied else head_only),
        "draft_fc": _count([network.fc]), "draft_layers": _count([network.layers]),
        "draft_norms": _count([network.hidden_norm, network.norm]),
        "num_target_layers": len(model.layers), "num_draft_layers": len(network.layers),
        "tapped_layers": list(shape.target_layers), "hidden_size": shape.hidden_size,
        "words": model.vocab_size - int(model.forbidden.sum()),
    }


def _count(modules: Iterable[torch.nn.Module]) -> int:
    """Number of parameters of the modules; shared parameters count once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
