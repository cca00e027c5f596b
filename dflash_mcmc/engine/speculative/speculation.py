"""The inputs and outputs of `rules.py`: drafted blocks, the random numbers that decide about them, and the verdicts.

All values are batches of rows. The anchor of a block is the last decided token. Slot j is the token j + 1 places after the
anchor. The draft proposes n tokens. The target gives distributions ("laws") for n + 1 slots, the last one after all drafted
tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key


@lru_cache(maxsize=256)
def tensor_of(values: Sequence, device: torch.device) -> torch.Tensor:
    """A constant on a device, made once: a captured step may not copy it there."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def count_dtype(most: int) -> torch.dtype:
    """The type of counts up to `most`."""
    return torch.uint8 if most < 2**8 else torch.int32


@dataclass(frozen=True)
class TokenTree:
    """A tree of drafted tokens: the number of candidates after each node, breadth first, without zeros at the end.

    Node 0 is the anchor. The candidates after a node are neighbours, and so are the nodes of a depth. One forward of the
    target reads all nodes: node k stands at place anchor + k of the cache, has the rotation of anchor + depth, and sees the
    tokens up to the anchor and the nodes on its own path. The laws are therefore those after each path, and the entries of
    the path that is kept are then moved to its places.

    A draft that is a model of its own, or a network with a step for each token, reads the nodes of a depth before it drafts
    the next depth: `read` has the nodes of a forward, None for all.
    """

    counts: tuple[int, ...]
    read: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """The number of drafted tokens."""
        return sum(self.counts)

    def reading(self, nodes: tuple[int, ...]) -> TokenTree:
        """The same tree for a forward that reads some of its nodes."""
        return replace(self, read=nodes)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node before each drafted token."""
        return tuple(node for node, count in enumerate(self.counts) for _ in range(count))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The distance of each node from the anchor."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most drafted tokens that a block can keep."""
        return self.depths[-1]

    def depth_of(self, device: torch.device) -> torch.Tensor:
        """`depths` on a device, int64 (nodes,)."""
        return tensor_of(self.depths, device)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes with candidates after them."""
        return tuple(node for node, count in enumerate(self.counts) if count)

    def first(self, node: int) -> int:
        """The first candidate after a node."""
        return 1 + sum(self.counts[:node])

    def level(self, depth: int) -> tuple[int, ...]:
        """The nodes of a depth that have candidates after them."""
        return tuple(node for node in self.inner if self.depths[node] == depth)

    def nodes(self, depth: int) -> slice:
        """All nodes of a depth."""
        return slice(self.depths.index(depth), len(self.depths) - self.depths[::-1].index(depth))

    @cached_property
    def seen(self) -> tuple[tuple[bool, ...], ...]:
        """Whether each node (outer) sees another: itself, and the nodes on its path."""
        rows = [[True] + [False] * len(self)]
        for node, parent in enumerate(self.parents, 1):
            rows.append([here or other == node for other, here in enumerate(rows[parent])])
        return tuple(map(tuple, rows))

    @property
    def behind(self) -> tuple[int, ...]:
        """How many places before that of each node that is read a chain would begin which goes on with it: 0 for a chain."""
        nodes = range(len(self) + 1) if self.read is None else self.read
        return tuple(node and node - 1 - self.parents[node - 1] for node in nodes)

    def offered(self, goes_on: Mapping[int, torch.Tensor], drafted: torch.Tensor) -> torch.Tensor | None:
        """Whether each token, bool (rows, n), is offered, by bool (rows, k) for each depth; None where all are."""
        if not goes_on:
            return None
        yes = torch.ones(len(drafted), len(self) + 1, dtype=torch.bool, device=drafted.device)
        for depth, goes in goes_on.items():
            level, here = self.level(depth), self.nodes(depth + 1)
            parents = self.parents[here.start - 1 : here.stop - 1]
            which = tensor_of(tuple(map(level.index, parents)), drafted.device)
            yes[:, here] = yes[:, tensor_of(parents, drafted.device)] & goes[:, which]
        return yes[:, 1:]

    def marks(self, drafted: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """How often each token is drafted on the path to a node, of `count_dtype`, (rows, nodes, vocabulary)."""
        dtype = count_dtype(self.depth)
        marks = torch.zeros(len(drafted), len(self) + 1, vocab_size, dtype=dtype, device=drafted.device)
        for depth in range(1, self.depth + 1):
            here = self.nodes(depth)
            above = marks[:, tensor_of(self.parents[here.start - 1 : here.stop - 1], drafted.device)]
            tokens = drafted[:, here.start - 1 : here.stop - 1, None]
            marks[:, here] = above.scatter_add(2, tokens, torch.ones_like(tokens, dtype=dtype))
        return marks

    def sight(self, first: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which keys each node that is read sees, bool (rows, nodes, keys), and the positions of nodes and keys in the text.

        Args:
            first: int64 (rows, 1), places of the first nodes: the positions of the anchors, if all nodes are read.
            keys: int64 (keys,), places in the cache.
        """
        nodes = tuple(range(len(self) + 1)) if self.read is None else self.read
        read, anchor = tensor_of(nodes, keys.device), first - nodes[0]
        depths, place = self.depth_of(keys.device), keys - anchor
        node = place.clamp(min=0, max=len(self))
        inside = (place >= 0) & (place <= len(self))
        seen = tensor_of(self.seen, keys.device)[read][:, node].transpose(0, 1) & inside[:, None]
        return seen | (place < 0)[:, None], anchor + depths[read], torch.where(inside, anchor + depths[node], keys)


def is_shape(counts: Sequence[int]) -> bool:
    """Whether these can be `TokenTree.counts`: every node exists, and the last has candidates after it."""
    upto = itertools.accumulate(counts, initial=0)
    return bool(counts) and counts[-1] > 0 and all(
        count >= 0 and node <= before for node, (count, before) in enumerate(zip(counts, upto, strict=False)))


class Block(NamedTuple):
    """A drafted block of each row.

    Attributes:
        drafted: int64 (rows, n).
        target: weights of the target's law for each slot, given the drafted tokens before it; (rows * (n + 1)).
        draft: weights of the law from which `drafted` was drawn, (rows * n); None for a point mass.
        first: bool (rows,), whether the anchor is the prompt's last token.
        offered: int64 (rows,), the drafted tokens that a rule may keep, 0 to n: a draft may end a block early. None for n.
            Whether slot k is offered must be known before its token is drawn; `match` alone allows more.
        tree: None for a chain. With a tree, `target` has a law for each node, (rows * (n + 1)), `draft` one for each node
            with candidates after it, (rows * `TokenTree.inner`), and `offered` is bool (rows, n).
    """

    drafted: torch.Tensor
    target: laws.Weights
    draft: laws.Weights | None
    first: torch.Tensor
    offered: torch.Tensor | None = None
    tree: TokenTree | None = None

    def is_offered(self) -> torch.Tensor:
        """Whether a rule may keep each drafted token, bool (rows, n)."""
        if self.offered is None:
            return torch.ones_like(self.drafted, dtype=torch.bool)
        if self.tree is not None:
            return self.offered
        return torch.arange(self.drafted.shape[1], device=self.drafted.device) < self.offered[:, None]


class Verdict(NamedTuple):
    """The decision about a block.

    Attributes:
        accepted: int64 (rows,), drafted tokens that are kept, 0 to n.
        tokens: int64 (rows, n + 1): the kept tokens and the next one; the rest is ignored.
        interval: float64 (rows, n + 1, 2), the interval of uniforms at the position that give the token; (0, 0) if the
            token does not depend on that uniform alone.
        nodes: int64 (rows, n + 1), with a tree of depth n the nodes after which `tokens` were drawn; None for a chain.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    interval: torch.Tensor
    nodes: torch.Tensor | None = None


class BlockRandom(Protocol):
    """The random numbers of one block. `testing.EnumeratedChance` enumerates their values."""

    def draft(self, weights: laws.Weights, first: int | torch.Tensor, shared: bool) -> torch.Tensor:
        """Draws tokens int64 (rows, k) for slots `first` on, or for the slots int64 (k,), from weights (rows * k).

        With `shared` the uniforms are those of `walk`.
        """

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws a token for each slot or node from the target, with the uniform of its position.

        Returns (tokens, intervals) of shapes (rows, n + 1) and (rows, n + 1, 2). Tokens after the first one that differs from
        the draft are ignored.
        """

    def accepts(self, probability: torch.Tensor, each: bool, tree: TokenTree | None = None) -> torch.Tensor:
        """Bool (rows, n), True with the given probability.

        Without `each`, values after the first False are ignored. With a tree, those off its walk are.
        """

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        """Draws a token for one slot per row, int64 (rows,), from weights (rows), with the uniform of its position."""

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        """Like `token`, with another random number: `draft` is the number that drafted the slot, `fresh` a separate one."""


Rule: TypeAlias = Callable[[Block, BlockRandom], Verdict]


class Fault(NamedTuple):
    """Mistakes of a faulty decoder outside its rule; see `rules.py`."""

    argmax_drafts: bool = False
    """The draft proposes its most likely token, but the token is judged like a drawn one."""
    raw_draft: bool = False
    """Drafts are judged by the draft's law before temperature and filters."""
    late_history: bool = False
    """A penalty's history lacks the last token."""
    window: int | None = None
    """The target reads a block with the latest `window` tokens alone; None reads it with all tokens."""


class BlockLengths(NamedTuple):
    """How many tokens the next block of a draw drafts, by what its blocks so far have kept.

    The state of a draw is a level, a whole number: the running estimate of the probability that a drafted token is kept. It
    depends on earlier blocks of the draw alone, so that the number of a block's tokens is known before any of them is drawn.

    Attributes:
        drafted: int64 (levels,), the drafted tokens of a block; 0 for a plain step.
        after: int64 (levels, 2, n + 1), the next level, by whether a token was refused, and by the number of kept ones.
        start: the level of a draw that begins.
    """

    drafted: np.ndarray
    after: np.ndarray
    start: int

    def next(self, level: int, accepted: int, offered: int) -> int:
        """The level after a block that kept `accepted` of its `offered` tokens."""
        return int(self.after[level, int(accepted < offered), accepted])


@cache
def block_lengths(most: int, ratio: float, top: int = 1024, memory: int = 16) -> BlockLengths:
    """Lengths that gain most tokens for their cost, if a block of k drafted tokens costs 1 + (ratio - 1) k / most plain steps.

    A kept token moves the level up by 1 / memory of what is above it, and a refused one down by 1 / memory of what is below.
    A plain step moves it up by one, so that a block is tried again after a while. A block has 0, 1, 3, 7, ... or `most`
    tokens.

    Args:
        most: drafted tokens of a whole block.
        ratio: the cost of a whole block, in plain steps.
        top: the level of probability 1.
    """
    counts = [0, *(2**power - 1 for power in range(1, most.bit_length() + 1) if 2**power - 1 < most), most]
    costs = [1.0 + (ratio - 1.0) * count / most for count in counts]
    drafted = np.zeros(top + 1, np.int64)
    for level in range(top + 1):
        of_block = np.cumsum(np.cumprod([1.0, *[level / top] * most]))  # 1 + a + ... + a^k tokens, of a chance a
        drafted[level] = counts[int(np.argmax(of_block[counts] / costs))]
    levels = np.arange(top + 1)
    up, down = levels + -((levels - top) // memory), levels - -(-levels // memory)
    after = np.empty((top + 1, 2, most + 1), np.int64)
    after[:, 0, 0] = np.minimum(levels + 1, top)
    after[:, 1, 0] = down
    kept = levels
    for count in range(1, most + 1):
        kept = up[kept]
        after[:, 0, count], after[:, 1, count] = kept, down[kept]
    return BlockLengths(drafted, after, 3 * top // 4)


class Drafts(Protocol):
    """Anything that drafts blocks of `num_drafted` tokens."""

    @property
    def num_drafted(self) -> int:
        """n."""


D = TypeVar("D", bound=Drafts)


class Speculation(NamedTuple, Generic[D]):
    """The settings for drawing block by block: drafter, rule, and randomness."""

    rule: Rule
    drafter: D
    """A `Drafter` of `drafter.py`; on the tabular engine a `TabularDraft`."""
    shared_noise: bool
    """Whether drafts are drawn with the uniforms of the positions, like the target's tokens."""
    temperature: float | None
    """Temperature of the draft; None takes that of the draw."""
    noisy: bool
    """Whether the rule needs random numbers besides those of the positions."""
    fault: Fault = Fault()
    trace: bool = False
    """Whether the verdict about each block is kept."""
    lengths: BlockLengths | None = None
    """How many tokens each block drafts; None for whole blocks."""
    tree: TokenTree | None = None
    """The shape of a block with several candidates for a place; None for a chain."""
    replacement: bool = False
    """Whether these candidates are drawn independently."""

    @property
    def num_drafted(self) -> int:
        """The number of drafted tokens of a block, at most."""
        return self.drafter.num_drafted if self.tree is None else len(self.tree)

    @property
    def num_noise(self) -> int:
        """The number of additional random numbers of a block."""
        return 2 * self.num_drafted if self.noisy else 0

    def draft_params(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters of the draft in a draw with `params`.

        They have no penalties, because the slots of the draft do not know one another. Every law of the draft is correct, but
        a law that is closer to the target's is accepted more often.
        """
        temperature = self.temperature if self.temperature is not None and params.temperature > 0.0 else params.temperature
        return params.without_penalties()._replace(temperature=temperature)

    def draft(self, weights: laws.Weights, chance: BlockRandom, first: int) -> torch.Tensor:
        """Draws drafted tokens int64 (rows, k) for slots `first` on, from weights (rows * k) of the draft's law."""
        tokens = chance.draft(weights, first, self.shared_noise)
        if self.fault.argmax_drafts:
            return weights.logits.argmax(dim=-1).view(tokens.shape)
        return tokens


class Noise(NamedTuple):
    """Additional uniforms of a draw, for each anchor at which a block may start: float64 (anchors, n) each.

    A position that is drafted again after a later anchor gets a new number. The earlier draft at that position has influenced
    the place of the anchor, because block verification judges whole prefixes.
    """

    drafts: np.ndarray
    accepting: np.ndarray

    @staticmethod
    def of(key: Key, start: int, stop: int, count: int) -> Noise:
        """The uniforms for anchors directly before the generated tokens `start` to `stop - 1`, for `count` drafted tokens."""
        return Noise(*(key.fold_in("speculation", use).uniforms(start * count, stop * count).reshape(-1, count)
                       for use in ("draft", "accept")))


class Uniforms(NamedTuple):
    """A BlockRandom with given uniforms, float64: `tokens` (rows, n + 1) by position, `drafts` and `accepting` (rows, n)."""

    tokens: torch.Tensor
    drafts: torch.Tensor
    accepting: torch.Tensor

    def draft(self, weights: laws.Weights, first: int | torch.Tensor, shared: bool) -> torch.Tensor:
        rows = len(self.tokens)
        count = len(weights.logits) // rows
        slots = slice(first, first + count) if isinstance(first, int) else first
        uniforms = (self.tokens if shared else self.drafts)[:, slots]
        return laws.draw(weights, uniforms.reshape(-1))[0].view(rows, count)

    def walk(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        uniforms = self.tokens if block.tree is None else self.tokens[:, block.tree.depth_of(self.tokens.device)]
        tokens, interval = laws.draw(block.target, uniforms.reshape(-1))
        return tokens.view(uniforms.shape), interval.view(*uniforms.shape, 2)

    def accepts(self, probability: torch.Tensor, each: bool, tree: TokenTree | None = None) -> torch.Tensor:
        return self.accepting < probability

    def token(self, weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
        return laws.draw(weights, self.tokens.gather(1, slot[:, None])[:, 0])[0]

    def again(self, weights: laws.Weights, slot: torch.Tensor, use: str) -> torch.Tensor:
        last = self.drafts.shape[1] - 1
        uniforms = (self.drafts if use == "draft" else self.accepting).gather(1, slot.clamp(max=last)[:, None])[:, 0]
        return laws.draw(weights, uniforms)[0]


def joined(parts: Sequence[laws.Weights], num_rows: int) -> laws.Weights:
    """Weights of all slots, (rows * slots), from the weights of some slots each, in turn."""
    if len(parts) == 1:
        return parts[0]
    return laws.Weights(*(torch.cat([value.unflatten(0, (num_rows, -1)) for value in values], dim=1).flatten(0, 1)
                          for values in zip(*parts, strict=True)))


def of_slots(weights: laws.Weights, chosen: torch.Tensor) -> laws.Weights:
    """Some of the weights, by their numbers, int64 (n,)."""
    return laws.Weights(*(values[chosen] for values in weights))


def at_slot(weights: laws.Weights, slot: torch.Tensor) -> torch.Tensor:
    """Probabilities (rows, vocabulary) of one slot of each row, int64 (rows,)."""
    rows = torch.arange(len(slot), device=slot.device)
    chosen = rows * (len(weights.logits) // len(slot)) + slot
    return _probabilities(weights, chosen)


def all_slots(weights: laws.Weights, num_rows: int) -> torch.Tensor:
    """Probabilities (rows, slots, vocabulary)."""
    values = _probabilities(weights, slice(None))
    return values.view(num_rows, -1, values.shape[-1])


def _probabilities(weights: laws.Weights, chosen: torch.Tensor | slice) -> torch.Tensor:
    values = weights.values[chosen]
    return (values.flatten(1) / weights.upto[chosen, -1:].to(values.dtype))[:, : weights.logits.shape[-1]]


def candidates(tree: TokenTree, depth: int, law: torch.Tensor, chance: BlockRandom | None,
            speculation: Speculation) -> torch.Tensor:
    """Draws the candidates after all nodes of a depth, int64 (rows, nodes of the next depth).

    Args:
        law: probabilities (rows, nodes of `TokenTree.level`, vocabulary) of the draft after each of these nodes; logits
            without `chance`, for the most likely tokens.
        speculation: whose noise they take, and whether with replacement.
    """
    level, base = tree.level(depth), tree.nodes(depth + 1).start
    tokens = torch.zeros(len(law), sum(tree.counts[node] for node in level), dtype=torch.int64, device=law.device)
    for turn in range(max(tree.counts[node] for node in level)):
        mine = tensor_of(tuple(index for index, node in enumerate(level) if tree.counts[node] > turn), law.device)
        nodes = tuple(tree.first(node) + turn for node in level if tree.counts[node] > turn)
        left = law[:, mine]
        if chance is None:
            drawn = left.flatten(0, 1).argmax(dim=-1).view(len(law), -1)
        else:
            weights = laws.of_values(torch.where(left.amax(dim=-1, keepdim=True) > 0, left, 1.0).flatten(0, 1))
            places = [depth] * len(nodes) if speculation.shared_noise else [node - 1 for node in nodes]
            drawn = chance.draft(weights, tensor_of(tuple(places), law.device), speculation.shared_noise)
        tokens[:, tensor_of(tuple(node - base for node in nodes), law.device)] = drawn
        if not speculation.replacement or chance is None:
            gone = left.scatter(-1, drawn[..., None], -torch.inf if chance is None else 0.0)
            law = law.index_copy(1, mine, gone)
    return tokens
