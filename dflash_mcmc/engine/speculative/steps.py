"""Decode steps: of one token for each row, of blocks that a draft proposes, and of rows that draw in different ways.

    PlainSteps   one token for each row, with one forward of the target
    Speculator   a draft proposes a block, the target reads it in one forward, and a rule accepts some tokens
    BlockSteps   draws from the draft, a block in a step
    MixedSteps   each row by its own kind of step

On a GPU a step can be captured once and replayed (`batched.py`). For this reason it never reads a value on the host, never
makes a tensor from host data, and has no shape that depends on values. Steps with a draft for every token are an exception.

The target's laws and log-probabilities, the weights of early rejection and the marks of a penalty of a verified block equal
those of plain steps. They are computed for every slot of the block from one forward, each slot with its own history. A sampler
therefore gets the same values from both kinds of steps.

The draft's distributions in a block depend only on the anchor and earlier tokens, so all tokens of a block are drawn from it
at once. One forward of the target over them gives their log-probabilities and the target's distribution for the next anchor.
A draw that starts inside a block keeps the tokens in the first slots. The answers equal those of drawing token by token
(`drafter.py`).
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from dflash_mcmc.engine.batching import logits_processor as laws, rows as row_state
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.chains import Slot
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.rows import Group, Rows, SharedForwards, Status, Stepper
from dflash_mcmc.engine.speculative.drafter import Anchors, BlockGrid, DFlashDrafter, Drafter, DraftStates
from dflash_mcmc.engine.speculative.rules import Block, Speculation, Uniforms, Verdict, draft_log_q, joined, target_log_p


def _finite(logits: Mapping[str, torch.Tensor], target: laws.Weights) -> torch.Tensor:
    """Whether all logits of a row are numbers, bool (rows,). The first are those of `target`."""
    finite = torch.isfinite(target.maximum[:, 0])
    for values in list(logits.values())[1:]:
        finite &= torch.isfinite(values.amax(dim=-1))
    return finite


class PlainSteps(Stepper):
    """Draws one token for every live row in each step, with one forward of the target."""

    tokens_a_step = 1

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.reach = runner.grid.block_size if runner.grid else 1

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        """One token for every live row among the first `batch`, and for the riders; see `Stepper.step`."""
        rows, position = state.ids[:batch], state.position[:batch]
        fed = state.tokens[rows, position][:, None]
        sources, grid, said = {group.source for group in groups}, self.runner.grid, None
        if grid is not None and self.runner.drafts(sources):
            said = grid.at_step(cache, state, batch, key_length)
        hidden = self.runner.forward(cache, slice(0, batch), fed, position[:, None], key_length)[:, 0]
        logits = self.runner.logits(hidden, [tap[:, 0] for tap in self.runner.tapped], sources, said)
        if riders is not None:
            # A rider has the logits of its leader. Sources that share a tensor still share one.
            ridden = {id(values): values[riders.leader] for values in logits.values()}
            logits = {name: ridden[id(values)] for name, values in logits.items()}
        if self.runner.model.takes_ranges and logits.keys() == {"blended"} and not any(map(row_state.num_columns, groups)):
            from dflash_mcmc.engine.batching import gpu  # Triton has packages for Linux alone

            tokens = gpu.drawn(state, logits["blended"], groups, self.runner.endings)
        else:
            tokens = self._drawn(state, logits, groups)
        if riders is not None:
            # Live riders part from leaders that have drawn another token or have ended.
            status = state.status[: riders.batch]
            apart = (tokens != tokens[riders.leader]) | (status[riders.leader] != Status.LIVE)
            state.status[: riders.batch] = torch.where((status == Status.LIVE) & apart, Status.DIVERGED, status)

    def _drawn(self, state: Rows, logits: dict[str, torch.Tensor], groups: tuple[Group, ...]) -> torch.Tensor:
        """Draws a token for each row of the logits, int64 (rows,), and advances the live rows. Other rows do not change."""
        batch = len(logits["blended"])
        rows, at, status = state.ids[:batch], state.position[:batch] + 1, state.status[:batch]
        target = laws.weigh(logits["blended"])
        failed = ~_finite(logits, target)
        history = state.history(batch)
        if len(groups) == 1 and groups[0].params.temperature == 0.0:
            tokens, interval, log_q = laws.draw_certain(logits[groups[0].source], groups[0].params, history)
        else:
            own = row_state.processed(logits, groups, 1, history)
            weights = target if own is target.logits else laws.weigh(own)  # the target's own are known
            tokens, interval = laws.draw(weights, state.uniforms[rows, at])
            log_q = weights.log_probability(tokens)
        failed |= ~torch.isfinite(log_q)  # processed logits that are not finite give no number
        log_p = target.log_probability(tokens)
        scores = torch.cat([log_p[:, None], log_q[:, None], interval], dim=1)
        further = row_state.columns_of_groups(groups, tokens, logits, target, history, 1, state.columns.shape[2])
        if further is not None:
            failed |= further.isnan().any(dim=1)
        live = status == Status.LIVE
        drawn = live & ~failed
        where = torch.where(drawn, at, state.nowhere)  # no branch: a captured step has the same writes for every row
        state.tokens[rows, where], state.scores[rows, where] = tokens, scores
        if further is not None:
            state.columns[rows, where] = further
        if len(state.seen):
            state.seen[rows, tokens] = state.seen[rows, tokens] | drawn
        if len(state.counts):
            state.counts[rows, tokens] = state.counts[rows, tokens] + drawn
        state.position[:batch] += drawn
        state.work[:, :batch] += live
        endings = self.runner.endings
        states = endings.states(state.matched[:batch], tokens[:, None], drawn[:, None])
        if states is not None:
            state.matched[:batch] = states[:, 0]
        ended = endings.ends(tokens[:, None], at[:, None], state.last[:batch], states)[:, 0]
        after = Status.DONE * ended
        if state.has_floors:
            state.weight[:batch] += torch.where(drawn, state.alpha[:batch] * scores[:, 0] - scores[:, 1], 0.0)
            below = row_state.below_floor(state, at[:, None], state.weight[:batch, None])[:, 0]
            after = torch.where(ended, after, Status.ABANDONED * below)  # a draw that has ended is judged as a whole
        after = torch.where(failed, Status.FAILED, after)
        state.status[:batch] = torch.where(live, after, status)
        return tokens


class BlockTrace(NamedTuple):
    """A record of one step of the first rows, for a trace: blocks, laws, random numbers and verdicts."""

    anchor: torch.Tensor
    """int64 (rows,), positions of the anchors."""
    block: Block
    uniforms: Uniforms
    verdict: Verdict
    gained: torch.Tensor
    """int64 (rows,), the number of tokens that each row has gained."""


class Drafted(NamedTuple):
    """Blocks that the target has not read yet.

    Attributes:
        fed, at: int64 (rows, slots), the anchors and the drafted tokens, and their positions.
        draft: see `Block`.
    """

    fed: torch.Tensor
    at: torch.Tensor
    draft: laws.Weights | None
    uniforms: Uniforms


class StepsOfBlocks(Stepper):
    """Proposes a block for each row, which the target reads in one forward.

    Args:
        runner: runs the target.
        num_drafted: tokens of a block after its anchor.
    """

    window: int | None = None
    """Number of tokens that the target attends to; None for all."""

    def __init__(self, runner: ModelRunner, num_drafted: int):
        self.runner, self.tokens_a_step, self.reach = runner, 1 + num_drafted, 1 + num_drafted
        self._offsets = torch.arange(self.reach, device=runner.model.device)

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        new = self.propose(cache, state, batch, key_length, groups)
        hidden = self.runner.forward(cache, slice(0, batch), new.fed, new.at, key_length, self.window, is_block=True)
        self.settle(state, new, hidden, groups)

    @abstractmethod
    def propose(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...]) -> Any:
        """What the target has to read for the first `batch` rows: tokens `fed` and positions `at`, int64 (rows, slots)."""

    @abstractmethod
    def settle(self, state: Rows, new: Any, hidden: torch.Tensor, groups: tuple[Group, ...]) -> None:
        """Gives live rows their tokens, by the result of `propose` and the target's states for it, (rows, slots, width)."""


class Speculator(StepsOfBlocks):
    """Makes decode steps in which every row verifies a drafted block.

    Args:
        runner: runs the target; its drafter proposes.
        speculation: the rule. With a trace, `walks` describes the latest step.
    """

    def __init__(self, runner: ModelRunner, speculation: Speculation[Drafter]):
        super().__init__(runner, speculation.num_drafted)
        self.speculation, self.drafter, self.walks = speculation, speculation.drafter, list[BlockTrace]()
        self.window = speculation.fault.window

    def cost(self, group: Group, tokens: int, counts: row_state.RowCounts) -> dict[str, int]:
        drafted = counts.fed - counts.rounds  # each step feeds an anchor and the drafted tokens
        extra = drafted if self.drafter.target_forwards else 0
        return {"tokens_drawn": tokens, "target_forwards": counts.rounds + extra,
                "token_forwards": counts.fed + extra, "blocks_drafted": counts.blocks,
                **({"blocks_verified": counts.blocks, "tokens_verified": tokens - (counts.rounds - counts.blocks)}
                   if self.runner.grid else {}),
                "tokens_drafted": drafted, "tokens_kept": counts.kept}

    def propose(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...]) -> Drafted:
        position = state.position[:batch]
        positions = position[:, None] + self._offsets
        rows = state.ids[:batch, None]
        noise, whole = state.noise[rows, positions[:, :1]][:, 0], self.speculation.num_drafted
        # Positions after the last one still hold uniforms of an earlier draw. Tokens drawn there are never kept, but a trace
        # shows them. A constant makes the trace independent of the earlier draw.
        tokens = torch.where(positions + 1 <= state.last[:batch, None], state.uniforms[rows, positions + 1], 0.5)
        uniforms = Uniforms(tokens, noise[:, :whole], noise[:, whole:])
        drafted, draft = self._draft(cache, state, position, key_length, groups, uniforms)
        anchors = state.tokens[state.ids[:batch]].gather(1, position[:, None])
        return Drafted(torch.cat([anchors, drafted], dim=1), positions, draft, uniforms)

    def settle(self, state: Rows, new: Drafted, hidden: torch.Tensor, groups: tuple[Group, ...]) -> None:
        fed, positions, draft, uniforms = new
        batch, position, proposed = len(fed), positions[:, 0], fed[:, 1:]
        sources = {group.source for group in groups}
        logits = self.runner.logits(hidden.flatten(0, 1), [tap.flatten(0, 1) for tap in self.runner.tapped], sources)
        target = laws.weigh(logits["blended"])
        history = self._history(state, batch, proposed) if any(group.has_penalty for group in groups) else laws.NO_HISTORY
        own = row_state.processed(logits, groups, self.reach, history)
        weights = target if own is target.logits else laws.weigh(own)
        block = Block(proposed, weights, draft, position + 1 == state.origin[:batch])
        verdict = self.speculation.rule(block, uniforms)
        tokens = verdict.tokens.reshape(-1)
        finite = (_finite(logits, target) & torch.isfinite(weights.maximum[:, 0])).view(batch, -1)
        if draft is not None:  # the rule needs finite draft logits too
            finite &= torch.isfinite(draft.maximum).view(batch, -1).all(dim=1, keepdim=True)
        scores = torch.stack([target.log_probability(tokens), weights.log_probability(tokens)], dim=1)
        scores = torch.cat([scores.view(batch, -1, 2), verdict.interval], dim=-1)
        live = state.status[:batch] == Status.LIVE
        further = row_state.columns_of_groups(groups, tokens, logits, target, history, self.reach, state.columns.shape[2])
        if further is not None:
            finite &= ~further.isnan().any(dim=1).view(batch, -1)
        offer = row_state.Proposal(
            positions + 1, torch.zeros_like(position), verdict.accepted, verdict.tokens, scores, ~finite,
            None if further is None else further.view(batch, self.reach, -1))
        gained = row_state.commit(state, offer, self.runner.endings)
        state.blocks[:batch] += live
        state.kept[:batch] += torch.minimum(verdict.accepted, gained)
        if self.speculation.trace:
            self.walks.append(BlockTrace(position, block, uniforms, verdict, gained))

    def _draft(self, cache: KVCache, state: Rows, position: torch.Tensor, key_length: int, groups: tuple[Group, ...],
               uniforms: Uniforms) -> tuple[torch.Tensor, laws.Weights | None]:
        """(drafted tokens, weights from which they were drawn); the weights are None if the draft is a point mass."""
        batch, weights = len(position), list[laws.Weights]()
        certain = all(self.speculation.draft_params(group.params).temperature == 0.0 for group in groups)

        def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
            if certain:
                return logits.flatten(0, 1).argmax(dim=-1).view(batch, -1)
            raw = logits.flatten(0, 1)
            drawn = laws.weigh(row_state.processed(raw, groups, logits.shape[1], params_of=self.speculation.draft_params))
            weights.append(laws.weigh(raw) if self.speculation.fault.raw_draft else drawn)
            return self.speculation.draft(drawn, uniforms, first)

        forward = functools.partial(self.runner.draft_logits, cache, slice(0, batch), key_length=key_length)
        live = state.status[:batch] == Status.LIVE
        anchors = Anchors(slice(0, batch), cache, state.tokens, position, key_length, forward, live)
        drafted = self.drafter.propose(anchors, draw)
        return drafted, joined(weights, batch) if weights else None

    def _history(self, state: Rows, batch: int, drafted: torch.Tensor) -> laws.History:
        """The tokens that penalties read in each slot, (rows * slots): the row's and the drafted ones before the slot."""
        dtype = torch.uint8 if drafted.shape[1] < 2**8 else torch.int32  # of counts of so many tokens
        marks = torch.zeros(*drafted.shape, state.vocab_size, dtype=dtype, device=drafted.device)
        marks = marks.scatter_(2, drafted[..., None], 1).cumsum(dim=1, dtype=dtype)
        marks = torch.nn.functional.pad(marks, (0, 0, 1, 0))
        if self.speculation.fault.late_history:
            marks = torch.nn.functional.pad(marks[:, :-1], (0, 0, 1, 0))
        seen, counts = state.history(batch)[:2]
        return laws.History(None if seen is None else (seen[:, None] | (marks > 0)).flatten(0, 1),
                            None if counts is None else (counts[:, None] + marks).flatten(0, 1))


class Tracer:
    """Collects a trace entry for each block of each chain.

    Args:
        walks: describe the latest step. They are taken out.
    """

    def __init__(self, walks: list[BlockTrace]):
        self.walks = walks

    def keep(self, slots: Sequence[Slot]) -> None:
        """Adds one entry to every slot whose row has gained a token in the latest step. Waits for the device."""
        for walk in self.walks:
            columns = [x.cpu().tolist() for x in (
                walk.anchor, walk.block.drafted, walk.verdict.accepted, walk.verdict.tokens, walk.gained, walk.uniforms.tokens,
                walk.uniforms.accepting, target_log_p(walk.block), draft_log_q(walk.block))]
            for slot, anchor, drafted, accepted, tokens, gained, uniforms, accepting, log_p, log_q in zip(
                    slots, *columns, strict=False):
                if gained:
                    of_p, of_q = ([value if math.isfinite(value) else None for value in values]  # JSON has no infinities
                                  for values in (log_p, log_q))
                    slot.part.walk.append({
                        "anchor": anchor - len(slot.part.operation.trajectory.prompt), "drafted": drafted, "log_p": of_p,
                        "log_q": None if walk.block.draft is None else of_q, "accepting": accepting or None,
                        "uniforms": uniforms, "accepted": accepted, "tokens": tokens[: accepted + 1], "gained": gained})
        self.walks.clear()  # the next step may verify no block


class GridBlocks(NamedTuple):
    """Blocks that are drawn from the draft, and that the target has not read yet.

    Attributes:
        fed, at: int64 (rows, slots), the anchors and the drawn tokens, and their positions.
        offset: int64 (rows,), the slots that the row has already.
        started: bool (rows,), whether the anchor is a generated token.
        drafting: bool (rows,), whether the row draws from the draft in this step.
        uniforms: float64 (rows, slots).
        hidden: the draft's hidden states, (rows, n, width); None for a model that drafts.
        draft, interval: weights of the draft's law, (rows * n), and the intervals of the drawn tokens.
    """

    fed: torch.Tensor
    at: torch.Tensor
    offset: torch.Tensor
    started: torch.Tensor
    drafting: torch.Tensor
    uniforms: torch.Tensor
    hidden: torch.Tensor | None
    draft: laws.Weights
    interval: torch.Tensor


class BlockSteps(StepsOfBlocks):
    """Draws a block per step for rows that draw from the draft of a grid."""

    def __init__(self, runner: ModelRunner, grid: BlockGrid):
        super().__init__(runner, grid.drafter.num_drafted)
        self.drafter = grid.drafter

    def propose(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...]) -> GridBlocks:
        position, rows = state.position[:batch], state.ids[:batch, None]
        last = position - state.origin[:batch]  # number of the last token; -1 for the prompt's
        started, offset = last >= 0, torch.remainder(last.clamp(min=0), self.reach)
        drafting = (state.status[:batch] == Status.LIVE) & started
        # A row of another group keeps its keys and values: it is fed only its last token.
        offset = torch.where(drafting, offset, 0)
        anchor = position - offset
        at = anchor[:, None] + self._offsets
        uniforms = state.uniforms[rows, at + 1]
        taken, known = self._offsets[1:] <= offset[:, None], state.tokens[rows, at[:, 1:]]
        parts, intervals = list[laws.Weights](), list[torch.Tensor]()

        def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
            slots = slice(first, first + logits.shape[1])
            parts.append(laws.weigh(row_state.processed(logits.flatten(0, 1), groups, logits.shape[1])))
            drawn, interval = laws.draw(parts[-1], uniforms[:, slots].reshape(-1))
            intervals.append(interval.view(batch, -1, 2))
            return torch.where(taken[:, slots], known[:, slots], drawn.view(batch, -1))

        forward = functools.partial(self.runner.draft_logits, cache, slice(0, batch), key_length=key_length)
        anchors, hidden = Anchors(slice(0, batch), cache, state.tokens, anchor, key_length, forward, drafting), None
        if isinstance(self.drafter, DFlashDrafter) and self.drafter.is_parallel:
            hidden = self.drafter.hidden(anchors)
            tokens = draw(self.drafter.logits(hidden), 0)
        else:
            tokens = self.drafter.propose(anchors, draw)
        fed = torch.cat([state.tokens[rows, at[:, :1]], tokens], dim=1)
        return GridBlocks(fed, at, offset, started, drafting, uniforms, hidden, joined(parts, batch),
                          torch.cat(intervals, dim=1).flatten(0, 1))

    def settle(self, state: Rows, new: GridBlocks, hidden: torch.Tensor, groups: tuple[Group, ...]) -> None:
        fed, at, offset, started, drafting, uniforms, of_draft, draft, interval = new
        batch = len(fed)
        said = None if of_draft is None else DraftStates(
            torch.nn.functional.pad(of_draft, (0, 0, 0, 1)).flatten(0, 1),
            (started[:, None] & (self._offsets < self.drafter.num_drafted)).flatten())
        tapped = [tap.flatten(0, 1) for tap in self.runner.tapped]
        target = laws.weigh(self.runner.logits(hidden.flatten(0, 1), tapped, (), said)["blended"])
        slot = torch.where(started, self.drafter.num_drafted, 0)  # the slot whose token is drawn from the target
        own = laws.weigh(row_state.processed(target.logits.view(batch, self.reach, -1)[state.ids[:batch], slot], groups, 1))
        token, own_interval = laws.draw(own, uniforms.gather(1, slot[:, None])[:, 0])
        tokens = torch.nn.functional.pad(fed[:, 1:], (0, 1)).scatter(1, slot[:, None], token[:, None])
        log_q = draft.log_probability(tokens[:, :-1].reshape(-1)).view(batch, -1)
        scores = torch.cat([
            target.log_probability(tokens.reshape(-1)).view(batch, -1, 1),
            torch.nn.functional.pad(log_q, (0, 1)).scatter(1, slot[:, None], own.log_probability(token)[:, None])[..., None],
            torch.nn.functional.pad(interval.view(batch, -1, 2), (0, 0, 0, 1)).scatter(
                1, slot[:, None, None].expand(-1, 1, 2), own_interval[:, None])], dim=-1)
        bad = ~torch.isfinite(target.maximum).view(batch, -1)
        bad[:, :-1] |= ~torch.isfinite(draft.maximum).view(batch, -1) & started[:, None]
        bad |= (self._offsets == slot[:, None]) & ~torch.isfinite(own.maximum)
        row_state.commit(state, row_state.Proposal(at + 1, offset, slot, tokens, scores, bad), self.runner.endings)
        state.blocks[:batch] += drafting & (offset < self.drafter.num_drafted)


_Parts: TypeAlias = Mapping[Stepper, tuple[Group, ...]]


class MixedSteps(Stepper):
    """Lets each row's own stepper make its steps.

    Each kind of rows has a separate step, because the numbers of a row must not depend on other rows. A step leaves the keys
    and values of other rows before their last token as they are. Steppers that read as many tokens of each row can share the
    forward of the target, since a row then has the same numbers.

    Args:
        runner: runs the target.
        blocks: draws from the draft, a block in a step.
        tokens: draws from the draft whose tokens need a penalty or further columns, token by token.
        others: draws from other sources.
        joined: `blocks` and `others` if their rows share forwards of the target; empty if not.
    """

    def __init__(self, runner: ModelRunner, blocks: Stepper, tokens: Stepper, others: Stepper,
                 joined: tuple[StepsOfBlocks, ...] = ()):
        self._runner, self._blocks, self._tokens, self._others, self._joined = runner, blocks, tokens, others, joined
        self._all = tuple(dict.fromkeys((blocks, tokens, others)))
        self.tokens_a_step = max(stepper.tokens_a_step for stepper in self._all)
        self.reach = max(stepper.reach for stepper in self._all)

    def cost(self, group: Group, tokens: int, counts: row_state.RowCounts) -> dict[str, int]:
        return self._of(group).cost(group, tokens, counts)

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        parts: dict[Stepper, tuple[Group, ...]] = {
            stepper: mine for stepper in self._all if (mine := tuple(g for g in groups if self._of(g) is stepper))}
        if len(parts) == 1:
            next(iter(parts)).step(cache, state, batch, key_length, groups)
        elif tuple(parts) == self._joined:
            self._together(cache, state, batch, key_length, parts)
        else:
            for stepper, mine, _ in _each(state, batch, parts):
                stepper.step(cache, state, batch, key_length, mine)

    def _together(self, cache: KVCache, state: Rows, batch: int, key_length: int, parts: _Parts) -> None:
        proposed, fed, at = list[Any](), torch.zeros(0), torch.zeros(0)
        for (_, mine, live), stepper in zip(_each(state, batch, parts), self._joined, strict=True):
            new = stepper.propose(cache, state, batch, key_length, mine)
            fed, at = (new.fed, new.at) if not proposed else (
                torch.where(live[:, None], new.fed, fed), torch.where(live[:, None], new.at, at))
            proposed.append(new)
        # A model that drafts reads all blocks again: for rows of the other part it has drafted what they do not draw.
        hidden = self._runner.forward(cache, slice(0, batch), fed, at, key_length)
        for (_, mine, _), stepper, new in zip(_each(state, batch, parts), self._joined, proposed, strict=True):
            stepper.settle(state, new, hidden, mine)

    def _of(self, group: Group) -> Stepper:
        """The stepper of a group's rows.

        A penalty needs the history of every slot of a block, and further columns need the logits of every slot.
        """
        if group.source != "draft":
            return self._others
        return self._tokens if group.has_penalty or row_state.num_columns(group) else self._blocks


def _each(state: Rows, batch: int, parts: _Parts) -> Iterator[tuple[Stepper, tuple[Group, ...], torch.Tensor]]:
    """(stepper, groups, bool (rows,)) of each part in turn. Meanwhile the rows of the other parts are not live."""
    status = state.status[:batch].clone()
    for stepper, mine in parts.items():
        live = torch.zeros(batch, dtype=torch.bool, device=state.device)
        live[torch.cat([group.members() for group in mine])] = True
        state.status[:batch] = torch.where(live, status, Status.DONE)
        yield stepper, mine, live
        status = torch.where(live, state.status[:batch], status)
    state.status[:batch] = status
