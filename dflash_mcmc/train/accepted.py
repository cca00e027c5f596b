"""Measures the quality of a draft as tokens per forward of the target, as if recorded responses were drawn speculatively.

The target's token is known at every position of a response. Speculation would accept the drafted tokens before the first one
that differs from the response. The response's token replaces the differing token. For greedy responses this is exactly greedy
speculation. For sampled responses it is exactly sample-and-match with a draft that proposes its most likely tokens.
(Sample-and-match compares the draft's tokens with a sample of the target.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from dflash_mcmc.draft.network.dflash import DFlash
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.train.blocks import TrainingBlocks, gather, possible_anchors
from dflash_mcmc.train.responses import Response


def count(draft: DFlash, model: LanguageModel, responses: Sequence[Response], rows_at_once: int,
          anchors_at_once: int) -> tuple[int, int]:
    """(number of tokens, number of forwards of the target) over all responses.

    Drafting starts at the last token of each prompt. The ratio is the accepted length tau, the mean number of tokens per
    forward. A forward yields the accepted tokens and the target's token after them.
    """
    longest = max(response.length for response in responses)
    tokens, forwards = by_position(draft, model, responses, rows_at_once, anchors_at_once, longest, 1)[0].tolist()
    return tokens, forwards


def by_position(draft: DFlash, model: LanguageModel, responses: Sequence[Response], rows_at_once: int, anchors_at_once: int,
                width: int, num_parts: int) -> np.ndarray:
    """Like `count`, for each part of the answers: int64 (num_parts, 2), numbers of tokens and of forwards.

    A forward and all its tokens belong to the part of its first token. Part n has the answers' tokens n * width to
    (n + 1) * width - 1, and the last part has all that follow.
    """
    found = np.zeros((num_parts, 2), np.int64)
    responses = sorted(responses, key=lambda response: response.length)
    for start in range(0, len(responses), rows_at_once):
        rows = responses[start : start + rows_at_once]
        for accepted, response in zip(accepted_lengths(draft, model, rows, anchors_at_once), rows, strict=True):
            anchors = walk(accepted, response.prompt_length - 1, response.length)
            for anchor, following in pairwise([*anchors, response.length - 1]):
                part = min((anchor + 1 - response.prompt_length) // width, num_parts - 1)
                found[part] += following - anchor, 1
    return found


def walk(accepted: np.ndarray, first: int, length: int) -> list[int]:
    """The anchors of the blocks from the anchor `first` to the end of a sequence of `length` tokens.

    Each block takes one forward of the target.

    Args:
        accepted: int64, at least `length` entries, the number of accepted tokens of the block at each anchor position.
    """
    anchors, anchor = [], first
    while anchor < length - 1:
        anchors.append(anchor)
        anchor += int(accepted[anchor]) + 1
    return anchors


@torch.no_grad()
def accepted_lengths(draft: DFlash, model: LanguageModel, responses: Sequence[Response], anchors_at_once: int) -> np.ndarray:
    """Number of accepted tokens of the block at each anchor position, int64 (responses, length of the longest).

    The number counts the leading drafted tokens that equal the response's tokens. It is 0 at positions where no block can
    start: before the last token of the prompt, and at the last token of the sequence.
    """
    anchors = [np.array(possible_anchors(response, prompt_end=True)) for response in responses]
    every = gather(responses, anchors).to(model.device)
    layers = draft.shape.target_layers
    features = sequences.read(model, every.tokens, layers).features(model, layers)
    accepted = torch.zeros(len(responses), every.tokens.shape[1] + 1, dtype=torch.int64, device=model.device)
    for start in range(0, every.anchors.shape[1], anchors_at_once):
        blocks = every._replace(anchors=every.anchors[:, start : start + anchors_at_once])
        found = _accepted(_proposed(draft, model, features, blocks), blocks)
        accepted.scatter_(1, blocks.anchors % accepted.shape[1], found)  # padding anchors (-1) write to the extra last column
    return accepted[:, :-1].cpu().numpy()


def _proposed(draft: DFlash, model: LanguageModel, features: torch.Tensor, blocks: TrainingBlocks) -> torch.Tensor:
    """The most likely token of each slot, int64 (rows, blocks, drafted tokens of a block).

    The token before a slot is the response's. If it differs from the drafted one, the slots after it do not count.
    """
    hidden = sequences.drafted(draft, model, features, *blocks)
    before = blocks.anchors.clamp(min=0)[..., None] + torch.arange(hidden.shape[2], device=hidden.device)
    previous = blocks.tokens.gather(1, before.flatten(1).clamp(max=blocks.tokens.shape[1] - 1)).view(before.shape)
    logits = draft.along(model.logits(hidden).flatten(0, 1), hidden.flatten(0, 1), previous.flatten(0, 1))
    return logits.argmax(dim=-1).view(before.shape)


def _accepted(proposed: torch.Tensor, blocks: TrainingBlocks) -> torch.Tensor:
    """Number of accepted tokens, int64 (rows, blocks), of the proposed ones, (rows, blocks, n)."""
    positions = blocks.anchors[..., None] + 1 + torch.arange(proposed.shape[-1], device=proposed.device)
    inside = positions < blocks.lengths[:, None, None]
    expected = blocks.tokens.gather(1, positions.flatten(1).clamp(max=blocks.tokens.shape[1] - 1)).view_as(proposed)
    return ((proposed == expected) & inside).long().cumprod(dim=-1).sum(dim=-1)
