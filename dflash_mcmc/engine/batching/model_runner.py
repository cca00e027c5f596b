"""Runs the target over KV caches, to read prompts and prefixes and to compute hidden states and logits.

A companion is another causal language model with a runner of its own. It is fed the tokens that the target is fed, in the same
step, at the same positions of the same rows, and keeps its keys and values in a companion of the target's cache. What happens
to a row, such as a rollback or a fork, so happens to both. A model that drafts has the same place, except that
it does not read the blocks that it has drafted.

The companion may be the target itself under another prompt (`SecondPrompts`). The second prompt ends at the position at which
the first one ends, so that the tokens of an answer have the same positions in both caches, and rows are copied and exchanged
alike. The positions before a shorter prompt hold tokens that no later token attends to. The model is given positions that
count from the start of the second prompt.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch

from dflash_mcmc.engine.batching import attention, logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache, chunks, round_up
from dflash_mcmc.engine.batching.interface import TargetBlend
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.linear import few_rows
from dflash_mcmc.engine.batching.recurrent_state import HybridCache, replay
from dflash_mcmc.engine.batching.rows import columns_of_tokens, num_columns
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.engine.speculative.drafter import BlockGrid, DFlashDrafter, Drafter, DraftStates
from dflash_mcmc.ops import Score


class Span(NamedTuple):
    """Tokens whose keys and values are missing in a row of a cache: positions `start` to `stop - 1` of `sequence`.

    `prompt` is the prompt with which the sequence begins, if there are second prompts.
    """

    row: int
    sequence: np.ndarray
    start: int
    stop: int
    prompt: np.ndarray | None = None


Beside: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""What a companion under another prompt is fed in a forward of the target: tokens, int64 (rows, queries), and the number of
positions before the second prompt of each row, int64 (rows,)."""


class SecondPrompts:
    """The second prompts of all rows.

    Args:
        prompts: second prompts, int64 (n,), by the bytes of the first ones, which are as long or longer and end in the same
            token.

    Attributes:
        skipped: int64 (rows,), the number of positions before the second prompt of each row.
    """

    def __init__(self, prompts: Mapping[bytes, np.ndarray], num_rows: int, device: torch.device):
        self._prompts = prompts
        self.skipped = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def begin(self, row: int, prompt: np.ndarray) -> None:
        """Notes the prompt of an operation that begins in a row."""
        self.skipped[row] = len(prompt) - len(self._prompts[prompt.tobytes()])

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        self.skipped[[a, b]] = self.skipped[[b, a]]

    def of_spans(self, prompts: Sequence[np.ndarray], first: np.ndarray, tokens: np.ndarray) -> Beside:
        """For pieces that begin at positions `first`, int64 (rows,), of sequences with these first prompts."""
        fed, skipped = tokens.copy(), np.zeros(len(prompts), np.int64)
        for row, prompt in enumerate(prompts):
            second = self._prompts[prompt.tobytes()]
            skipped[row] = len(prompt) - len(second)
            at = np.arange(first[row], first[row] + tokens.shape[1])
            inside = (at >= skipped[row]) & (at < len(prompt))
            fed[row, inside] = second[at[inside] - skipped[row]]
        device = self.skipped.device
        return torch.from_numpy(fed).to(device), torch.from_numpy(skipped).to(device)


class ModelRunner:
    """Runs the target on KV caches.

    Args:
        model: the target.
        blend: changes the last hidden state; None for no change.
        attention: name in `transformers`' registry.
        length: length of the longest cache.
        key_step: lengths of keys are multiples of it.
        prefill_chunk: longest piece in which spans are read, a power of two >= 8.
        drafter: receives the target's features of every token that the target reads; None for no drafter.
        grid: the draft's hidden states for every token, if the blend or a draw uses them.
        companion: runs the companion, whose cache is the last of `KVCache.chain`; None without one.
        drafting: runs the model of a `ModelDrafter`, whose cache is `KVCache.drafts`; None without one.
        second: the prompts of the companion; None if it reads the target's.
    """

    def __init__(self, model: LanguageModel, blend: TargetBlend | None, attention: str, length: int, key_step: int,
                 prefill_chunk: int, drafter: Drafter | None = None, grid: BlockGrid | None = None,
                 companion: "ModelRunner | None" = None, second: SecondPrompts | None = None,
                 drafting: "ModelRunner | None" = None):
        self.model, self.attention, self.drafter, self.grid = model, attention, drafter, grid
        self.companion, self.second, self.drafting = companion, second, drafting
        self.beside = [runner for runner in (companion, drafting) if runner is not None]
        self._beside, self._drafted = list[torch.Tensor](), list[torch.Tensor]()
        self.blend = TargetBlend() if blend is None else blend
        self.key_step, self.prefill_chunk = key_step, prefill_chunk
        self._blended_layers = self.blend.tapped_layers(len(model.layers))
        self._tapped: list[torch.Tensor] = []
        self._keys = torch.arange(length, device=model.device)
        self.endings = Endings(model.stop_ids, model.stop_strings, model.device, model.strings)

    def drafts(self, sources: Collection[str]) -> bool:
        """Whether logits of these sources read the draft's blocks."""
        return self.grid is not None and (self.blend.needs_draft or "draft" in sources)

    @contextmanager
    def ready(self, few: bool = False) -> Iterator[None]:
        """A context for one thread at a time, in which the model has tapped layers and the engine's attention.

        Args:
            few: whether products are those of few rows (`linear.py`).
        """
        with ExitStack() as stack:
            for runner in sorted((self, *self.beside), key=lambda runner: id(runner.model.turn)):  # else two could lock up
                stack.enter_context(runner.model.turn.taken(nests=True))
            for runner in self.beside:
                stack.enter_context(runner.ready(few))
            if self.model.device.type == "cuda":  # streams and graphs belong to the current device
                stack.enter_context(torch.cuda.device(self.model.device))
            stack.enter_context(self.model.attending(self.attention))
            stack.enter_context(few_rows(self.model.decoder, few))
            features = self.drafter.tapped_layers if self.drafter else ()
            self._tapped = stack.enter_context(self.model.tapped((*self._blended_layers, *features)))
            yield

    @property
    def tapped(self) -> list[torch.Tensor]:
        """What `logits` takes of the latest forward, each (rows, queries, width).

        Outputs of the blend's layers, or hidden states of the companion; then those of a model that drafts, where it reads.
        """
        return [*(self._beside or self._tapped[: len(self._blended_layers)]), *self._drafted]

    def forward(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
                key_length: int, window: int | None = None, beside: Beside | None = None,
                is_block: bool = False) -> torch.Tensor:
        """Hidden states after the final norm: (rows, queries, width).

        Args:
            rows: the first rows as a slice, or int64 (rows,).
            tokens, positions: int64 (rows, queries).
            key_length: larger than every position.
            window: number of tokens that each query attends to, itself included; None for all.
            beside: what a companion under another prompt is fed; None for the same tokens, which follow its prompt.
            is_block: whether the tokens are blocks of the drafter. A model that drafts does not read them again.
        """
        if self.companion is not None:
            if self.second is not None and beside is None:
                beside = tokens, self.second.skipped[rows]
            fed, skipped = (tokens, None) if beside is None else beside
            self._beside = [self.companion._forward(cache.chain()[-1], rows, fed, positions, key_length, window, skipped)]
        if self.drafting is not None:
            self._drafted = [] if is_block else [
                self.drafting._forward(cache.drafts, rows, tokens, positions, key_length, None)]
        return self._forward(cache, rows, tokens, positions, key_length, window)

    def draft_logits(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
                     key_length: int) -> torch.Tensor:
        """Logits after these tokens, of a model that drafts or else of the target; see `Anchors`."""
        if self.drafting is None:
            hidden = self.forward(cache, rows, tokens, positions, key_length)
            return self.logits(hidden[:, -1], [tap[:, -1] for tap in self.tapped], ())["blended"]
        hidden = self.drafting._forward(cache.drafts, rows, tokens, positions, key_length, None)
        return _logits_beside(self.model, self.drafting.model, hidden[:, -1])

    def _forward(self, cache: KVCache, rows: slice | torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor,
                 key_length: int, window: int | None, skipped: torch.Tensor | None = None) -> torch.Tensor:
        cache.aim(rows, positions, key_length)
        at = positions if skipped is None else (positions - skipped[:, None]).clamp(min=0)
        first = _first(positions, window, skipped)
        mask: torch.Tensor | dict[str, torch.Tensor] | None = first
        if not self.model.takes_ranges:
            keys = self._keys[:key_length]
            causal = keys <= positions[..., None]
            causal = causal if first is None else causal & (keys >= first[..., None])
            additive = self.model.dtype if self.attention in attention.ADDITIVE else None
            mask = self.model.masks.of(causal, positions, keys, additive)
        # A chunk may reach beyond the last position. Its queries there are padding, so clamping their rotation is harmless.
        limit = self.model.max_positions
        hidden = self.model.hidden(tokens, cache, attention_mask=mask,
                                   position_ids=at if limit is None else at.clamp(max=limit - 1))
        if self.drafter is not None:
            # The last layer's output is taken after the final norm, as in `hidden_states`.
            outputs, last_layer = self._tapped[len(self._blended_layers) :], len(self.model.layers) - 1
            features = [hidden if layer == last_layer else output
                        for layer, output in zip(self.drafter.tapped_layers, outputs, strict=True)]
            self.drafter.absorb(cache.drafts, rows, tokens, positions, features)
        return hidden

    def replay(self, cache: KVCache, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Prepares rows to be fed from these positions on: states of recurrent layers are computed where they are missing."""
        if isinstance(cache, HybridCache) and rows:
            replay(self.model.recurrent_nets, cache, np.array(rows), np.array(positions))

    def read(self, cache: KVCache, spans: Sequence[Span]) -> int:
        """Reads spans piece by piece. Returns the number of forwards."""
        forwards = 0
        for size, pieces in self.pieces(spans, len(spans)):
            self.states(cache, [piece for _, piece in pieces], size)
            forwards += 1
        return forwards

    def pieces(self, spans: Sequence[Span], most_rows: int) -> Iterator[tuple[int, list[tuple[int, Span]]]]:
        """The forwards that read spans: for each the size, and (number of a span, what is left of it). Pieces of the same
        size share a forward of at most `most_rows`.
        """
        todo = [list(chunks(span.start, span.stop, self.prefill_chunk)) for span in spans]
        while waiting := [number for number, left in enumerate(todo) if left]:
            size = todo[waiting[0]][0][1]
            together = [number for number in waiting if todo[number][0][1] == size][:most_rows]
            yield size, [(number, spans[number]._replace(start=todo[number].pop(0)[0])) for number in together]

    def states(self, cache: KVCache, spans: Sequence[Span], size: int) -> torch.Tensor:
        """Reads the first `size` tokens of spans of different rows in one forward.

        Returns the hidden states after the final norm, (spans, size, width). A shorter span is padded.
        """
        first = np.array([span.start for span in spans])
        pieces = [span.sequence[span.start : min(span.start + size, span.stop)] for span in spans]
        tokens = np.stack([np.pad(piece, (0, size - len(piece))) for piece in pieces])
        # A piece may reach beyond the cache. The tokens there are padding. They share its last position, which is no token's.
        positions = np.minimum(first[:, None] + np.arange(size), cache.length - 1)
        key_length = min(round_up(int(first.max()) + size, self.key_step), cache.length)
        rows = np.array([span.row for span in spans])
        stops = np.minimum(first + size, [span.stop for span in spans])
        beside = None
        if self.second is not None:
            beside = self.second.of_spans([span.prompt for span in spans if span.prompt is not None], first, tokens)
        sent = [torch.from_numpy(array).to(self.model.device) for array in (rows, tokens, positions)]
        with cache.reading(np.stack([rows, first, stops], axis=1)):
            return self.forward(cache, sent[0], sent[1], sent[2], key_length, beside=beside)

    def logits(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor], sources: Collection[str],
               said: DraftStates | None = None) -> dict[str, torch.Tensor]:
        """Float32 logits (rows, vocabulary): `blended`, and the other sources that draws use.

        Args:
            hidden: (rows, width), after the final norm.
            tapped: see `tapped`.
            sources: values of `ops.Draw.source`.
            said: the draft's hidden states, if they are used.
        """
        companion = None if self.companion is None else self.companion.model
        blended = len(self._blended_layers) if companion is None else 1
        tapped, drafted = tapped[:blended], tapped[blended:]
        if said is not None and said.hidden is not None and self.blend.needs_draft:
            tapped = [torch.where(said.inside[:, None], said.hidden.float(), hidden.float())]
        mixed, own = mixed_logits(self.model, self.blend, hidden, tapped, companion)
        if own is None:
            own = self.model.logits(hidden) if tapped and "base" in sources else mixed
        logits = {"blended": mixed}
        if "base" in sources:
            logits["base"] = own
        if "draft" in sources and self.grid is not None and said is not None:
            of_draft = (_logits_beside(self.model, self.drafting.model, drafted[0]) if self.drafting else
                        cast("DFlashDrafter", self.grid.drafter).logits(cast("torch.Tensor", said.hidden)))
            logits["draft"] = torch.where(said.inside[:, None], of_draft, mixed)
        return logits


def _first(positions: torch.Tensor, window: int | None, skipped: torch.Tensor | None) -> torch.Tensor | None:
    """The first key that a query at each position sees, int64 (rows, queries); None for 0.

    Queries before the prompt see each other, because a row of weights needs a key.
    """
    first = None if window is None else (positions - window + 1).clamp(min=0)
    if skipped is None:
        return first
    own = torch.where(positions < skipped[:, None], 0, skipped[:, None])
    return own if first is None else torch.maximum(first, own)


def mixed_logits(model: LanguageModel, blend: TargetBlend, hidden: torch.Tensor, tapped: Sequence[torch.Tensor],
                 companion: LanguageModel | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 logits (rows, vocabulary) of a blend; and the target's own, if the blend takes logits.

    Args:
        hidden: (rows, width), the target's states after its final norm.
        tapped: what the blend mixes in, each (rows, width): states of the companion, or of its layers, or of the draft.
        companion: the model of these states, for a blend that takes logits; else None.
    """
    if companion is None:
        return model.logits(blend.mix(hidden.float(), [state.float() for state in tapped],
                                      lambda h: model.final_norm(h.to(model.dtype)).float())), None
    own = model.logits(hidden)
    return blend.mix(own, [_logits_beside(model, companion, tapped[0])], lambda values: values), own


def _logits_beside(model: LanguageModel, other: LanguageModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of another model for the ids of the target: its head may have other rows of padding."""
    logits = other.logits(hidden)
    return torch.nn.functional.pad(logits, (0, model.vocab_size - logits.shape[-1]), value=-torch.inf)


class PromptReader:
    """Keys and values of a few prompts.

    Args:
        runner: reads the prompts.
        cache: a cache with a row for each prompt.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache):
        self._runner, self._cache = runner, cache
        self._rows: dict[bytes, int] = {}
        self._free = list(range(cache.num_rows))

    @property
    def num_rows(self) -> int:
        """The number of prompts that fit."""
        return self._cache.num_rows

    def read(self, prompts: Sequence[np.ndarray]) -> tuple[int, int]:
        """Reads the missing prompts, and drops all others. Returns the number of tokens and forwards."""
        wanted = {prompt.tobytes(): prompt for prompt in prompts}
        for name in [name for name in self._rows if name not in wanted]:
            self._free.append(self._rows.pop(name))
        spans = []
        for name, prompt in wanted.items():
            if name not in self._rows:
                self._rows[name] = self._free.pop()
                self._cache.clear(self._rows[name])  # an earlier prompt may have left numbers that are not finite
                spans.append(Span(self._rows[name], prompt, 0, len(prompt) - 1, prompt))
        return sum(span.stop for span in spans), self._runner.read(self._cache, spans)

    def copy(self, prompt: np.ndarray, cache: KVCache, row: int) -> int:
        """Copies a prompt without its last token into a row of another cache. Returns their number, 0 if unread."""
        if (source := self._rows.get(prompt.tobytes())) is None:
            return 0
        cache.copy(self._cache, source, row, 0, len(prompt) - 1)
        return len(prompt) - 1

    def clear(self) -> None:
        """Forgets all prompts, which may hold NaN."""
        self._rows.clear()
        self._free = list(range(self.num_rows))
        self._cache.clear()


Scored: TypeAlias = tuple[np.ndarray, ...]
"""(log p, log q, intervals, columns) of scored tokens."""


def scores(runner: ModelRunner, cache: KVCache, asked: Sequence[tuple[Span, Score]], most_rows: int) -> list[Scored | None]:
    """The scores of different rows, read piece by piece. Pieces of the same size share a forward.

    None is for a score with logits or processed logits that are not finite.

    Args:
        asked: scores, each with the span of the tokens before the scored ones. Their keys and values are missing, but for
            those before the span.
        most_rows: rows of a forward.
    """
    scored: list[list[Scored] | None] = [[] for _ in asked]
    for size, pieces in runner.pieces([span for span, _ in asked], most_rows):
        hidden, tapped = runner.states(cache, [piece for _, piece in pieces], size), list(runner.tapped)
        for row, (index, piece) in enumerate(pieces):
            score, own, said = asked[index][1], scored[index], None
            count = min(size, piece.stop - piece.start)
            if runner.grid and runner.drafts({score.source}):
                said = runner.grid.along(cache, piece.row, piece.sequence, len(score.trajectory.prompt), piece.start, count)
            logits = runner.logits(hidden[row, :count], [state[row, :count] for state in tapped], {score.source}, said)
            new = _scored_piece(logits, score, piece.sequence, piece.start)
            if new is None or own is None:
                scored[index] = None
            else:
                own.append(new)
    return [None if own is None else tuple(np.concatenate(values) for values in zip(*own, strict=True)) for own in scored]


def _scored_piece(logits: dict[str, torch.Tensor], score: Score, sequence: np.ndarray, first: int) -> Scored | None:
    """The scores of the tokens after the positions from `first` on; None if they are not finite. Each has its own history."""
    if not all(torch.isfinite(values.amax(dim=-1)).all() for values in logits.values()):
        return None
    values = logits[score.source]
    targets = torch.from_numpy(sequence[first + 1 : first + 1 + len(values)]).to(values.device)
    every, origin = (score.params, *score.laws), len(score.trajectory.prompt)
    history = laws.history_along(every, sequence, origin, first + 1, values)
    weights, target = laws.weigh(laws.process(values, score.params, history)), laws.weigh(logits["blended"])
    further = values[:, :0].double()
    if num_columns(score):
        further = columns_of_tokens(targets, values, target, score, history)
    scores = tuple(x.cpu().numpy() for x in (target.log_probability(targets), weights.log_probability(targets),
                                             laws.intervals(weights, targets), further))
    return None if any(np.isnan(values).any() for values in scores) else scores  # processed logits are not finite
