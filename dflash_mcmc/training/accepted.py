"""How good a draft is: tokens of a response for each forward of the target, if blocks were drafted along it.

Where the target's token is known at every position, so is what speculation would have accepted: from an anchor, the
drafted tokens up to the first that is not the response's, which stands there instead. For greedy responses that is greedy
speculation; for sampled ones it is sample-and-match with the draft's most likely tokens, draw for draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.speculative.dflash.network import DFlash
from dflash_mcmc.forcing import sequences
from dflash_mcmc.training.blocks import TrainingBlocks, gather, possible_anchors
from dflash_mcmc.training.responses import Response


def count(draft: DFlash, model: LanguageModel, responses: Sequence[Response], rows_at_once: int,
          anchors_at_once: int) -> tuple[int, int]:
    """(tokens, forwards) of all responses: their tokens, and the blocks from each prompt's last token on.

    The ratio is the accepted length tau: the accepted tokens of a forward, and the one that follows them.
    """
    tokens = forwards = 0
    responses = sorted(responses, key=lambda response: response.length)
    for start in range(0, len(responses), rows_at_once):
        rows = responses[start : start + rows_at_once]
        accepted = accepted_lengths(draft, model, rows, anchors_at_once)
        tokens += sum(response.length - response.prompt_length for response in rows)
        forwards += sum(walk(row, response.prompt_length - 1, response.length)
                        for row, response in zip(accepted, rows, strict=True))
    return tokens, forwards


def walk(accepted: np.ndarray, first: int, length: int) -> int:
    """Blocks, that is forwards of the target, from the anchor `first` to the end of a sequence of `length` tokens.

    Args:
        accepted: int64 (at least length,), tokens that a block accepts, by the position of its anchor.
    """
    anchor, forwards = first, 0
    while anchor < length - 1:
        anchor += int(accepted[anchor]) + 1
        forwards += 1
    return forwards


@torch.no_grad()
def accepted_lengths(draft: DFlash, model: LanguageModel, responses: Sequence[Response], anchors_at_once: int) -> np.ndarray:
    """int64 (responses, longest): drafted tokens that are the response's, up to the first that is not, by anchor.

    0 where no block can begin: before the prompt's last token, and at the sequence's last.
    """
    anchors = [np.array(possible_anchors(response, prompt_end=True)) for response in responses]
    every = gather(responses, anchors).to(model.device)
    layers = draft.shape.target_layers
    features = sequences.read(model, every.tokens, layers).features(model, layers)
    accepted = torch.zeros(len(responses), every.tokens.shape[1] + 1, dtype=torch.int64, device=model.device)
    for start in range(0, every.anchors.shape[1], anchors_at_once):
        blocks = every._replace(anchors=every.anchors[:, start : start + anchors_at_once])
        found = _accepted(model.logits(sequences.drafted(draft, model, features, *blocks)).argmax(dim=-1), blocks)
        accepted.scatter_(1, blocks.anchors % accepted.shape[1], found)  # -1, no anchor, falls on the column behind the last
    return accepted[:, :-1].cpu().numpy()


def _accepted(proposed: torch.Tensor, blocks: TrainingBlocks) -> torch.Tensor:
    """int64 (rows, blocks) of proposed tokens (rows, blocks, block_size - 1)."""
    positions = blocks.anchors[..., None] + 1 + torch.arange(proposed.shape[-1], device=proposed.device)
    inside = positions < blocks.lengths[:, None, None]
    there = blocks.tokens.gather(1, positions.flatten(1).clamp(max=blocks.tokens.shape[1] - 1)).view_as(proposed)
    return ((proposed == there) & inside).long().cumprod(dim=-1).sum(dim=-1)
