"""Applies the target's head to the outputs of decoder layers and of the draft, along an answer.

Only hidden states are kept, in the model's own precision, because logits would take too much memory. The head is applied to
as many positions at a time as `forcing/sequences.py` allows. For Qwen3-4B, 36 layers of a sequence of 3,372 tokens take
0.62 GB in bfloat16 and one forward. If all layers together need more than `_STATES_BYTES`, groups of layers are read one
after another, each with its own forward.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import mixed_logits
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.answers import Answer

_STATES_BYTES = 768 * 2**20


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
        reading = sequences.read(model, tokens, group)
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
        speaks[slots], states[slots] = True, sequences.forced_blocks(draft, answer.prompt, answer.tokens).draft
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
        states = [sequences.read(companion, tokens).hidden[0, first:-1]]
    else:
        layers = blend.tapped_layers(len(model.layers))
        states = [output[0, first:-1] for output in sequences.read(model, tokens, layers).outputs]
    alone = blend.other()

    def head(places: torch.Tensor) -> torch.Tensor:
        return mixed_logits(model, alone, last[places], [state[places] for state in states], companion)[0]

    return Source(torch.arange(len(last), device=model.device), head, last.new_ones(len(last), dtype=torch.bool))


@torch.no_grad()
def standing(logits: torch.Tensor, tokens: torch.Tensor) -> Standing:
    """Ranks and log-probabilities of tokens, int64 (n,), under float32 logits (n, vocabulary). Raises NotNumbers."""
    return Standing(sequences.ranks(logits, tokens), log_probability(logits, tokens), logits.argmax(dim=-1))


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
    at_once = sequences.positions_at_once(model.vocab_size)
    return (slice(start, min(start + at_once, n)) for start in range(0, n, at_once))
