"""Measures what a draft extracts from the target's features: probability and rank of an answer's tokens in both models.

The answer is teacher-forced in whole blocks that do not overlap. Slot 0 of a block is known. The draft's prediction for each
later slot is compared with the target's distribution for the same token. All modes of a block are drafted in one masked pass:

- `mask`: as in training. The context is the target's features, and the block is the known token and then masks.
- `gold`: the block holds the tokens to predict. A draft is never trained this way.
- `random`: like `gold`, with Gaussian noise of the same norm instead of the features.
- `reinject`, an option: like `mask`, and every k-th block after the first sees the prompt's features once more, at the
  prompt's positions.

Source: the document `deep_readout_diagnostic`, sections 2.2, 2.3 and 6 ("periodic re-injection of prompt features").
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.probe import rounded
from dflash_mcmc.rng import Key

_NOISE_VALUES = 2**22
"""Noise values drawn at a time, in float64, to limit memory for long prompts."""


class Hidden(NamedTuple):
    """Hidden states from which the head predicts the compared tokens, and these tokens."""

    target: torch.Tensor
    """(blocks, size - 1, hidden)."""
    draft: torch.Tensor
    """(modes, blocks, size - 1, hidden)."""
    tokens: torch.Tensor
    """int64 (blocks, size - 1)."""


@torch.inference_mode()
def hidden_states(drafter: DFlashDrafter, prompt: np.ndarray, answer: np.ndarray, context: str, key: Key,
                  modes: Sequence[str], reinject_every: int | None = None) -> Hidden:
    """Hidden states of target and draft for the whole blocks of an answer, at least one.

    Args:
        prompt, answer: int64 token ids.
        context: what a block sees before its anchor; `full`, `block` or `prompt`, as `probe.context`.
        key: random key of the noise.
        reinject_every: the blocks that see the prompt again; needed if `reinject` is one of the modes.
    """
    model, network, size, count = drafter.target, drafter.network, drafter.num_drafted + 1, len(modes)
    places, device = sequences.whole_blocks(len(prompt), len(answer), size), model.device
    anchors, last = torch.tensor(places, device=device), places[-1]
    tokens = torch.from_numpy(np.concatenate([prompt, answer])[: last + size]).to(device)
    windows = tokens.unfold(0, size, 1)[anchors]  # (blocks, size)
    reading = sequences.read(model, tokens[None], drafter.tapped_layers)
    features = reading.features(model, drafter.tapped_layers)[0, :last].to(drafter.dtype)
    segments = list(zip([0, *places], places, strict=False))  # what each block has besides the context of those before
    rows = torch.stack([noise(features, segments, key).to(drafter.dtype) if mode == "random" else features for mode in modes])
    masks = torch.full_like(windows, network.shape.mask_token_id)
    masks[:, 0] = windows[:, 0]
    inputs = torch.stack([masks if mode in ("mask", "reinject") else windows for mode in modes])
    spans = {"block": segments, "prompt": [(0, len(prompt))] * len(places), "full": [(0, last)] * len(places)}[context]
    first, end = torch.tensor(spans, device=device).T[..., None]
    position = torch.arange(last, device=device)
    seen = ((position >= first) & (position < end)).expand(count, -1, -1)
    positions = position.expand(count, -1)
    if reinject_every is not None:
        # The context ends with a copy of the prompt's features. Only the mode `reinject` sees it, in its re-injected blocks.
        number = torch.arange(len(places), device=device)
        shown = torch.tensor([mode == "reinject" for mode in modes], device=device)[:, None] & (
            (number > 0) & (number % reinject_every == 0))
        seen = torch.cat([seen, shown[..., None].expand(-1, -1, len(prompt))], dim=-1)
        rows = torch.cat([rows, rows[:, : len(prompt)]], dim=1)
        positions = torch.cat([positions, positions[:, : len(prompt)]], dim=1)
    drafted = sequences.drafted(
        network, model, rows, tokens[:last].expand(count, -1), torch.full((count,), last, device=device),
        anchors.expand(count, -1), inputs, seen, positions)
    before = anchors[:, None] + torch.arange(size - 1, device=device)
    return Hidden(reading.hidden[0, before], drafted, windows[:, 1:])


@torch.inference_mode()
def read_out(drafter: DFlashDrafter, hidden: Hidden, modes: Sequence[str]) -> dict[str, dict]:
    """`p`, probabilities at temperature 1 to six digits, and `rank` of the compared tokens in their order, by reader.

    A rank is 1 + the number of tokens with a strictly larger logit. Raises NotNumbers.
    """
    tokens, found = hidden.tokens.flatten(), dict[str, dict]({"p": {}, "rank": {}})
    heads: dict[str, tuple[Callable, torch.Tensor]] = {"target": (drafter.target.logits, hidden.target)}
    heads |= {mode: (drafter.logits, drafted) for mode, drafted in zip(modes, hidden.draft, strict=True)}
    for reader, (logits_of, states) in heads.items():
        p, rank = found["p"].setdefault(reader, []), found["rank"].setdefault(reader, [])
        for piece in sequences.pieces(drafter.target, len(tokens)):
            logits, labels = logits_of(states.flatten(0, 1)[piece]), tokens[piece]
            log_p = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(dim=-1)
            p += rounded(log_p.exp())
            rank += sequences.ranks(logits, labels).tolist()
    return found


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


def count_parameters(model: LanguageModel, network: DFlash) -> dict:
    """Parameters by component, and the sizes that the diagram needs, as JSON values. `words` are ids with a token.

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
