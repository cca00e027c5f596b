"""Teacher forcing of whole sequences.

One forward gives the target's states at every position, and another one gives the draft's states in every block. Only hidden
states are kept, because logits of all positions would not fit into memory. The head is applied to a limited number of
positions at a time (`positions_at_once`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache

from dflash_mcmc.draft.network.dflash.network import DFlash, block_pass
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

_CHUNK = 4096
"""Maximal number of positions in one forward. It bounds the memory of a layer."""
_CHUNK_OF_SCORES = 512
"""Like `_CHUNK`, for attention that holds the scores of all positions."""
_LOGITS_BYTES = 64 * 2**20


class NotNumbers(ArithmeticError):
    """The logits are not numbers, so the answer cannot be measured. The error's text goes into the record."""

    def __init__(self):
        super().__init__(NOT_NUMBERS)


class Reading(NamedTuple):
    """The target's states along sequences.

    Attributes:
        hidden: (rows, length, hidden), after the final norm.
        outputs: outputs of the requested layers, in their order, each (rows, length, hidden), before any norm.
        cache: keys and values of all tokens, if requested; else None.
    """

    hidden: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    cache: Cache | None

    def kept_cache(self) -> Cache:
        """The cache of a reading that has kept it. Raises ValueError for any other reading."""
        if self.cache is None:
            raise ValueError("the reading has kept no cache: read with keep_cache=True")
        return self.cache

    def features(self, model: LanguageModel, layers: tuple[int, ...]) -> torch.Tensor:
        """A draft's features, (rows, length, layers · hidden). The reading must have the outputs of the draft's layers.

        The last layer's output is taken after the final norm, as in `hidden_states` of transformers.
        """
        last = len(model.layers) - 1
        return torch.cat([self.hidden if layer == last else output
                          for layer, output in zip(layers, self.outputs, strict=True)], dim=-1)


@torch.no_grad()
def read(model: LanguageModel, tokens: torch.Tensor, layers: tuple[int, ...] = (), keep_cache: bool = False) -> Reading:
    """Reads sequences, int64 (rows, length). Padding on the right has no effect on earlier positions."""
    length = tokens.shape[1]
    chunk = _CHUNK if model.reading_attention == "sdpa" else _CHUNK_OF_SCORES
    known = model.config if model.recurrent_nets else None  # without a configuration all layers get keys and values
    cache = DynamicCache(config=known) if keep_cache or length > chunk else None
    hidden, outputs = [], []
    # A running engine has set its own attention, which would materialise the scores of all positions.
    with model.attending(model.reading_attention), model.tapped(layers) as tapped:
        for start in range(0, length, chunk):
            piece = tokens[:, start : start + chunk]
            hidden.append(model.hidden(piece, cache))
            outputs.append(tuple(tapped))
    return Reading(_joined(hidden), tuple(_joined(list(pieces)) for pieces in zip(*outputs, strict=True)),
                   cache if keep_cache else None)


def drafted(draft: DFlash, model: LanguageModel, features: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor,
            anchors: torch.Tensor, given: torch.Tensor | None = None, seen: torch.Tensor | None = None,
            positions: torch.Tensor | None = None, first_row: int | None = None) -> torch.Tensor:
    """Hidden states (rows, blocks, drafted tokens of a block, hidden) of the drafted slots of all blocks.

    Args:
        features: (rows, length, features · hidden), features of the context.
        tokens: int64 (rows, length), padded on the right. lengths: int64 (rows,).
        anchors: int64 (rows, blocks), positions; -1 for an unused block.
        given: int64 (rows, blocks, block_size), the block's input tokens; None for the usual input, the anchor's token and
            then masks.
        seen: bool (rows, blocks, length), positions before the anchor that a block may see; None for all of them.
        positions: int64 (rows, length), the position of each feature, -1 for padding; None for 0, 1, 2, ... up to `lengths`.
        first_row: the first row of a block whose states are returned; None for the shape's, the first drafted slot.
    """
    shape, weight = draft.shape, draft.fc.weight
    first_row = shape.first_row if first_row is None else first_row
    if positions is None:
        positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        positions = positions.masked_fill(positions >= lengths[:, None], -1)
    keys, values = draft.keys_values(draft.context(features.to(weight.dtype)), positions)
    if given is None:
        given = torch.full((*anchors.shape, shape.block_size), shape.mask_token_id, device=features.device)
        given[..., 0] = tokens.gather(1, anchors.clamp(min=0))
    with torch.no_grad():
        embeddings = torch.nn.functional.embedding(given, model.decoder.get_input_embeddings().weight)
        embeddings = embeddings.to(weight.dtype) * shape.embedding_scale
    # Attention scores between two blocks are wasted. This limit keeps them to at most half of all scores.
    at_once = max(1, min(features.shape[1], _BLOCK_ROWS) // shape.block_size)
    count = anchors.shape[1]
    parts = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
    return torch.cat([block_pass(draft, keys, values, positions, anchors[:, part], embeddings[:, part],
                                 None if seen is None else seen[:, part])[:, :, first_row:] for part in parts], dim=1)


def drafted_along(drafter: DFlashDrafter, reading: Reading, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Hidden states (blocks, num_drafted, hidden) of blocks whose input is the anchor's token, then masks, as in speculation.

    Args:
        reading: the reading of the sequence, with the drafter's layers.
        tokens: int64 (length,). anchors: int64 (blocks,).
    """
    masks = torch.full((1, len(anchors), drafter.num_drafted + 1), drafter.network.shape.mask_token_id, device=tokens.device)
    masks[0, :, 0] = tokens[anchors]
    features = reading.features(drafter.target, drafter.tapped_layers)
    length = torch.tensor([len(tokens)], device=tokens.device)
    return drafted(drafter.network, drafter.target, features, tokens[None], length, anchors[None], masks)[0]


_BLOCK_ROWS = 512
"""Maximal number of block tokens in one forward. It bounds the size of their attention scores."""


def whole_blocks(prompt_length: int, num_tokens: int, block_size: int) -> list[int]:
    """Positions of the anchors of an answer's whole blocks. With block size B these are its tokens 0, B, 2B, and so on."""
    return [prompt_length + start for start in range(0, num_tokens - block_size + 1, block_size)]


def checked(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits (n, vocabulary) unchanged if each row defines a distribution.

    Raises NotNumbers for a row that contains NaN or inf, and for a row in which all values are -inf. The maximum of a row
    shows all three cases in one pass, because it is NaN if any value is NaN.
    """
    if not logits.amax(dim=-1).isfinite().all():
        raise NotNumbers
    return logits


def ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Ranks, int64 (n,), of tokens, int64 (n,), in logits (n, vocabulary).

    A rank is 1 + the number of strictly larger logits. Ties share a rank. Raises NotNumbers, because a NaN would otherwise
    get the best rank.
    """
    return 1 + (checked(logits) > logits.gather(1, tokens[:, None])).sum(dim=-1)


def positions_at_once(vocab_size: int, whole: int = 1) -> int:
    """Number of positions whose float32 logits are computed at a time, a positive multiple of `whole`."""
    return max(1, _LOGITS_BYTES // (4 * vocab_size * whole)) * whole


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
