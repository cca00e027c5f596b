"""Teacher forcing of whole sequences.

One forward gives the target's states at every position, and another one gives the draft's states in every block. Only hidden
states are kept, because logits of all positions would not fit into memory. The head is applied to a limited number of
positions at a time (`positions_at_once`).

Many continuations of one prefix are read in one forward (`branches`). Keys and values of the prefix exist once. Common
beginnings of continuations are read once. All continuations share a single row. A mask lets each token see the prefix and the
earlier tokens of its own continuation (the tree attention of SpecInfer, arXiv 2305.09781, section 4).

The head is also applied to the outputs of decoder layers and of the draft, along an answer. For Qwen3-4B, 36 layers of a
sequence of 3,372 tokens take 0.62 GB in bfloat16 and one forward. If all layers together need more than `_STATES_BYTES`,
groups of layers are read one after another, each with its own forward.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from dflash_mcmc.draft.network.dflash import DFlash, block_pass
from dflash_mcmc.engine.batching import attention
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import mixed_logits
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing.answers import Answer

_CHUNK = 4096
"""Maximal number of positions in one forward. It bounds the memory of a layer."""
_CHUNK_OF_SCORES = 512
"""Like `_CHUNK`, for attention that holds the scores of all positions."""
_ROWS_AT_ONCE = 512
"""Maximal number of tokens of blocks or of continuations in one forward. It bounds the size of their attention scores."""
_LOGITS_BYTES = 64 * 2**20
_STATES_BYTES = 768 * 2**20


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
    config = model.config if model.recurrent_nets else None  # without a configuration all layers get keys and values
    cache = DynamicCache(config=config) if keep_cache or length > chunk else None
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
    at_once = max(1, min(features.shape[1], _ROWS_AT_ONCE) // shape.block_size)
    count = anchors.shape[1]
    pieces = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
    return torch.cat([block_pass(draft, keys, values, positions, anchors[:, piece], embeddings[:, piece],
                                 None if seen is None else seen[:, piece])[:, :, first_row:] for piece in pieces], dim=1)


class ForcedBlocks(NamedTuple):
    """Target and draft along the whole blocks of an answer, at least one.

    Attributes:
        reading: the target's states along prompt and answer.
        anchors: positions of the blocks' known tokens.
        target: (blocks, n, hidden), the target's states that predict the drafted tokens of the blocks.
        draft: (blocks, n, hidden), the draft's, whose input is the anchor's token and then masks, as in speculation.
        labels: int64 (blocks, n), the answer's tokens there.
    """

    reading: Reading
    anchors: list[int]
    target: torch.Tensor
    draft: torch.Tensor
    labels: torch.Tensor


def forced_blocks(drafter: DFlashDrafter, prompt: np.ndarray, answer: np.ndarray, keep_cache: bool = False) -> ForcedBlocks:
    """Reads a prompt and an answer, token ids int64, and drafts the answer's whole blocks."""
    size, network, model = drafter.num_drafted + 1, drafter.network, drafter.target
    tokens = torch.from_numpy(np.concatenate([prompt, answer])).to(model.device)
    anchors = whole_blocks(len(prompt), len(answer), size)
    reading, at = read(model, tokens[None], drafter.tapped_layers, keep_cache), torch.tensor(anchors, device=model.device)
    windows = tokens.unfold(0, size, 1)[at]
    masks = torch.full_like(windows, network.shape.mask_token_id)
    masks[:, 0] = windows[:, 0]
    states = drafted(network, model, reading.features(model, drafter.tapped_layers), tokens[None],
                     torch.tensor([len(tokens)], device=model.device), at[None], masks[None])[0]
    before = at[:, None] + torch.arange(size - 1, device=model.device)
    return ForcedBlocks(reading, anchors, reading.hidden[0, before], states, windows[:, 1:])


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


class Source(NamedTuple):
    """A source of distributions ("laws") for the tokens of an answer.

    Attributes:
        states: (n, hidden), the states that predict the n tokens; for `other_source`, their places 0 to n - 1.
        head: some of `states` to float32 logits (m, vocabulary).
        speaks: bool (n,), tokens for which the law is valid.
    """

    states: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    speaks: torch.Tensor


class Standing(NamedTuple):
    """Ranks and log-probabilities of tokens under their laws, each (n,).

    Attributes:
        rank: int64, 1 + number of tokens that are more likely.
        log_p: float64, in nats.
        best: int64, the most likely token; the first among equals.
    """

    rank: torch.Tensor
    log_p: torch.Tensor
    best: torch.Tensor


@torch.no_grad()
def readings(model: LanguageModel, answer: Answer,
             layers: Sequence[int]) -> Iterator[tuple[torch.Tensor, dict[int, torch.Tensor]]]:
    """The states that predict an answer's n tokens, each (n, hidden), a group of layers at a time.

    They are the target's states after the final norm, and the outputs of the layers (the residual stream) by layer number.
    """
    tokens = torch.from_numpy(answer.sequence).to(model.device)[None]
    of_a_layer = tokens.shape[1] * model.config.hidden_size * model.dtype.itemsize
    at_once, first = max(1, _STATES_BYTES // of_a_layer), len(answer.prompt) - 1
    for start in range(0, len(layers), at_once):
        group = tuple(layers[start : start + at_once])
        reading = read(model, tokens, group)
        yield reading.hidden[0, first:-1], {layer: output[0, first:-1]
                                            for layer, output in zip(group, reading.outputs, strict=True)}


def layer_source(model: LanguageModel, states: torch.Tensor, norm: str) -> Source:
    """The head applied to a layer's output, either directly (`none`) or after the model's final norm (`final`).

    Of the target's last states, which are after the final norm, `none` is the target itself.
    """
    def normed(hidden: torch.Tensor) -> torch.Tensor:
        return model.logits(model.final_norm(hidden.to(model.dtype)))

    return Source(states, normed if norm == "final" else model.logits, states.new_ones(len(states), dtype=torch.bool))


@torch.no_grad()
def draft_source(model: LanguageModel, draft: DFlashDrafter, answer: Answer) -> Source:
    """The draft as in speculation: whole blocks from the answer's first token on, with masks after the anchor.

    It has no law for anchors or for tokens after the last whole block.
    """
    block, n = draft.num_drafted + 1, len(answer.tokens)
    speaks = torch.zeros(n, dtype=torch.bool, device=model.device)
    states = torch.zeros(n, model.config.hidden_size, dtype=draft.dtype, device=model.device)
    if n >= block:
        slots = torch.arange(n // block * block, device=model.device).view(-1, block)[:, 1:]
        speaks[slots], states[slots] = True, forced_blocks(draft, answer.prompt, answer.tokens).draft
    return Source(states, draft.logits, speaks)


@torch.no_grad()
def other_source(model: LanguageModel, blend: Any, companion: LanguageModel | None, answer: Answer,
                 last: torch.Tensor, second: np.ndarray | None = None) -> Source:
    """What a blend mixes into the target's logits along an answer.

    Args:
        companion: the model that the blend reads; None if it reads layers of the target.
        last: (n, hidden), the target's states after the final norm, that predict the n tokens.
        second: int64, the prompt of the companion; None for the answer's own.
    """
    prompt = answer.prompt if second is None else second
    tokens, first = torch.from_numpy(np.concatenate([prompt, answer.tokens])).to(model.device)[None], len(prompt) - 1
    if companion is not None:
        states = [read(companion, tokens).hidden[0, first:-1]]
    else:
        layers = blend.tapped_layers(len(model.layers))
        states = [output[0, first:-1] for output in read(model, tokens, layers).outputs]
    alone = blend.other()

    def head(places: torch.Tensor) -> torch.Tensor:
        return mixed_logits(model, alone, last[places], [state[places] for state in states], companion)[0]

    return Source(torch.arange(len(last), device=model.device), head, last.new_ones(len(last), dtype=torch.bool))


@torch.no_grad()
def standing(logits: torch.Tensor, tokens: torch.Tensor) -> Standing:
    """Ranks and log-probabilities of tokens, int64 (n,), under float32 logits (n, vocabulary). Raises NotNumbers."""
    return Standing(ranks(logits, tokens), log_probability(logits, tokens), logits.argmax(dim=-1))


@torch.no_grad()
def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p in nats, float64 (n,), of tokens, int64 (n,), under float32 logits (n, vocabulary).

    The largest logit is subtracted first, and the rest is computed in float64. Without a norm the logits of a layer are in
    the thousands, and float32 would leave no digits of a likely token's log p.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    total = (logits - largest).exp_().sum(dim=-1, dtype=torch.float64)
    return (logits.gather(1, tokens[:, None]) - largest)[:, 0].double() - total.log()


@torch.no_grad()
def standings(model: LanguageModel, source: Source, tokens: torch.Tensor) -> Standing:
    """Ranks and log-probabilities of all tokens of an answer, int64 (n,), under a source's laws. Raises NotNumbers."""
    of_pieces = [standing(source.head(source.states[piece]), tokens[piece]) for piece in pieces(model, len(tokens))]
    return Standing(*map(torch.cat, zip(*of_pieces, strict=True)))


def pieces(model: LanguageModel, n: int) -> Iterator[slice]:
    """Pieces of an answer's tokens whose logits fit into memory."""
    at_once = positions_at_once(model.vocab_size)
    return (slice(start, min(start + at_once, n)) for start in range(0, n, at_once))


PREFIX = -1
"""The parent of a token that directly follows the prefix."""


class Tree:
    """Tokens after a prefix, numbered from 0 in the order in which they are read.

    Args:
        cache: the cache of a sequence, one row, whose first `length` tokens are the prefix. It is not changed.

    Raises UserError for a model that cannot read continuations together.
    """

    def __init__(self, model: LanguageModel, cache: Cache, length: int):
        if model.recurrent_nets:
            refuse()
        self._model, self._length = model, length
        self._attention = attention.implementation("auto", model.device, model.changes_scores)
        layers: Any = cache.layers
        self._cache = DynamicCache([(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in layers])
        self._paths: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        """Tokens that have been read, without the prefix."""
        return len(self._paths)

    def read(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states (tokens, hidden) of the next tokens, after the final norm.

        Args:
            parents: the number of the token before each token, or `PREFIX`.
        """
        before = len(self._paths)
        for node, parent in enumerate(parents, start=before):
            self._paths.append((node,) if parent == PREFIX else (*self._paths[parent], node))
        new, device = self._paths[before:], self._model.device
        depths = np.array([len(path) for path in new])
        seen = np.zeros((len(new), self._length + len(self._paths)), dtype=bool)
        seen[:, : self._length] = True
        seen[np.repeat(np.arange(len(new)), depths), self._length + np.concatenate(new)] = True
        every = np.concatenate([np.arange(self._length), self._length - 1 + np.array([len(path) for path in self._paths])])
        input_ids, position_ids, keys = (torch.from_numpy(row).to(device)[None]
                                         for row in (np.array(tokens), self._length - 1 + depths, every))
        additive = self._model.dtype if self._attention in attention.ADDITIVE else None
        mask = self._model.masks.of(torch.from_numpy(seen).to(device)[None], position_ids, keys, additive)
        with self._model.attending(self._attention):
            return self._model.hidden(input_ids, self._cache, attention_mask=mask, position_ids=position_ids)[0]


def refuse() -> NoReturn:
    """Raises UserError: recurrent states after a prefix cannot be shared by a mask."""
    raise UserError("probe: given one that reads many continuations of a text together; allowed with recurrent layers, whose "
                    "states a mask cannot share: another probe, or speculative_mcmc with probe.weights=reference and "
                    "probe.autoregressive=false")


def predictors(model: LanguageModel, cache: Cache, last: torch.Tensor, length: int, tokens: np.ndarray
               ) -> tuple[torch.Tensor, np.ndarray]:
    """Reads continuations, int64 (count, n), of a prefix. Common beginnings are read once.

    Returns the states that predict their tokens, (states, hidden), after the final norm, and which of them predicts each
    token, int64 (count, n): equal beginnings share their states.

    Args:
        cache: the cache of a sequence, one row; its first `length` tokens are the prefix.
        last: (hidden,), the state of the prefix's last token.
    """
    read = tokens[:, :-1]  # the last token predicts nothing
    order = np.lexsort(read.T[::-1]) if read.shape[1] else np.arange(len(read))
    hidden, which = [last[None]], np.zeros(tokens.shape, dtype=np.int64)
    # Attention scores between two continuations are wasted. After a long prefix this limit keeps them to at most half of all.
    limit = min(max(length, 256), _ROWS_AT_ONCE)
    count = 1
    for rows in _parts(read[order], limit):
        # A tree, in which equal beginnings share nodes: the parent of each node, its token, and the node of each read token
        node_of, parents, of_node = dict[tuple[int, int], int](), list[int](), list[int]()
        for index in order[rows]:
            node = PREFIX
            for position, token in enumerate(read[index].tolist(), start=1):
                parent = node
                node = node_of.setdefault((parent, token), len(node_of))
                if node == len(of_node):
                    parents.append(parent)
                    of_node.append(token)
                which[index, position] = count + node
        hidden.append(Tree(model, cache, length).read(parents, of_node))
        count += len(of_node)
    return torch.cat(hidden), which


def _parts(rows: np.ndarray, limit: int) -> Iterator[slice]:
    """Consecutive slices of the rows. The tree of a slice has at most `limit` nodes, unless the slice is a single row."""
    width = rows.shape[1]
    if not width:
        return
    differs = rows[1:] != rows[:-1]
    new = np.where(differs.any(axis=1), width - differs.argmax(axis=1), 0)
    start, total = 0, width
    for row, more in enumerate(new.tolist(), start=1):
        total += more
        if total > limit:
            yield slice(start, row)
            start, total = row, width
    yield slice(start, len(rows))
