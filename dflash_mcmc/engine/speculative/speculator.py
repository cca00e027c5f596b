"""Speculative decode steps. A draft proposes a block, the target reads it in one forward, and a rule accepts some tokens.

The target's laws and log-probabilities, the weights of early rejection and the marks of a penalty equal those of plain steps.
They are computed for every slot of the block from one forward, each slot with its own history. A sampler therefore gets the
same values from both kinds of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.chains import Slot
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.rows import Group, RowCounts, Rows, SharedForwards, Status, columns_of_groups, processed
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import Anchors, Drafter
from dflash_mcmc.engine.speculative.rules import Proposal, commit
from dflash_mcmc.engine.speculative.speculation import (
    Block,
    Speculation,
    Uniforms,
    Verdict,
    count_dtype,
    joined,
)


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


class Speculator:
    """Makes decode steps in which every row verifies a drafted block.

    Args:
        runner: runs the target; its drafter proposes.
        speculation: the rule. With a trace, `walks` describes the latest step.
    """

    def __init__(self, runner: ModelRunner, speculation: Speculation[Drafter]):
        self.runner, self.speculation, self.walks = runner, speculation, list[BlockTrace]()
        self.drafter = speculation.drafter
        self.tokens_a_step = self.reach = 1 + self.drafter.num_drafted
        self._offsets = torch.arange(self.reach, device=runner.model.device)

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        drafted = counts.fed - counts.rounds  # each step feeds an anchor and the drafted tokens
        extra = drafted if self.drafter.target_forwards else 0
        return {"tokens_drawn": tokens, "target_forwards": counts.rounds + extra,
                "token_forwards": counts.fed + extra, "blocks_drafted": counts.blocks,
                **({"blocks_verified": counts.blocks, "tokens_verified": tokens - (counts.rounds - counts.blocks)}
                   if self.runner.grid else {}),
                "tokens_drafted": drafted, "tokens_kept": counts.kept}

    def step(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             riders: SharedForwards | None = None) -> None:
        """See `Stepper.step`. Every live row gains up to `tokens_a_step` tokens."""
        drafted = self.propose(cache, state, batch, key_length, groups)
        hidden = self.runner.forward(cache, slice(0, batch), drafted.fed, drafted.at, key_length, self.window, is_block=True)
        self.settle(state, drafted, hidden, groups)

    @property
    def window(self) -> int | None:
        """Number of tokens that the target attends to; None for all."""
        return self.speculation.fault.window

    def propose(self, cache: KVCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...]) -> Drafted:
        """See `BlockSteps.propose`."""
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

    def settle(self, state: Rows, drafted: Drafted, hidden: torch.Tensor, groups: tuple[Group, ...]) -> None:
        """See `BlockSteps.settle`."""
        fed, positions, draft, uniforms = drafted
        batch, position, proposed = len(fed), positions[:, 0], fed[:, 1:]
        sources = {group.source for group in groups}
        logits = self.runner.logits(hidden.flatten(0, 1), [tap.flatten(0, 1) for tap in self.runner.tapped], sources)
        target = laws.weigh(logits["blended"])
        history = self._history(state, batch, proposed) if any(group.has_penalty for group in groups) else laws.NO_HISTORY
        own = processed(logits, groups, self.reach, history)
        weights = target if own is target.logits else laws.weigh(own)
        block = Block(proposed, weights, draft, position + 1 == state.origin[:batch])
        verdict = self.speculation.rule(block, uniforms)
        tokens = verdict.tokens.reshape(-1)
        finite = torch.isfinite(target.maximum[:, 0])
        for values in list(logits.values())[1:]:
            finite &= torch.isfinite(values.amax(dim=-1))
        finite = (finite & torch.isfinite(weights.maximum[:, 0])).view(batch, -1)
        if draft is not None:  # the rule needs finite draft logits too
            finite &= torch.isfinite(draft.maximum).view(batch, -1).all(dim=1, keepdim=True)
        scores = torch.stack([target.log_probability(tokens), weights.log_probability(tokens)], dim=1)
        scores = torch.cat([scores.view(batch, -1, 2), verdict.interval], dim=-1)
        live = state.status[:batch] == Status.LIVE
        further = columns_of_groups(groups, tokens, logits, target, history, self.tokens_a_step, state.columns.shape[2])
        if further is not None:
            finite &= ~further.isnan().any(dim=1).view(batch, -1)
        offer = Proposal(positions + 1, torch.zeros_like(position), verdict.accepted, verdict.tokens, scores, ~finite,
                      None if further is None else further.view(batch, self.tokens_a_step, -1))
        gained = commit(state, offer, self.runner.endings)
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
            drawn = laws.weigh(processed(raw, groups, logits.shape[1], params_of=self.speculation.draft_params))
            weights.append(laws.weigh(raw) if self.speculation.fault.raw_draft else drawn)
            return self.speculation.draft(drawn, uniforms, first)

        def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.runner.draft_logits(cache, slice(0, batch), tokens, positions, key_length)

        live = state.status[:batch] == Status.LIVE
        anchors = Anchors(slice(0, batch), cache, state.tokens, position, key_length, forward, live)
        drafted = self.drafter.propose(anchors, draw)
        return drafted, joined(weights, batch) if weights else None

    def _history(self, state: Rows, batch: int, drafted: torch.Tensor) -> laws.History:
        """The tokens that penalties read in each slot, (rows * slots): the row's and the drafted ones before the slot."""
        dtype = count_dtype(drafted.shape[1])
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
        self._walks = walks

    def keep(self, slots: Sequence[Slot]) -> None:
        """Adds one entry to every slot whose row has gained a token in the latest step. Waits for the device."""
        for walk in self._walks:
            log_p = rules.target_log_p(walk.block)
            log_q = rules.draft_log_q(walk.block) if walk.block.draft is not None else None
            columns = [x.cpu().tolist() for x in (
                walk.anchor, walk.block.drafted, walk.verdict.accepted, walk.verdict.tokens, walk.gained, walk.uniforms.tokens,
                log_p)]
            accepting, draft = walk.uniforms.accepting.cpu().tolist(), None if log_q is None else log_q.cpu().tolist()
            for row, (slot, anchor, drafted, accepted, tokens, gained, uniforms, p) in enumerate(
                    zip(slots, *columns, strict=False)):
                if gained:
                    slot.walk.append({
                        "anchor": anchor - len(slot.operation.trajectory.prompt), "drafted": drafted,
                        "log_p": [_number(value) for value in p],
                        "log_q": None if draft is None else [_number(value) for value in draft[row]],
                        "accepting": accepting[row] or None, "uniforms": uniforms, "accepted": accepted,
                        "tokens": tokens[: accepted + 1], "gained": gained})
        self._walks.clear()  # the next step may verify no block


def _number(log_p: float) -> float | None:
    """None for a token of probability zero: JSON has no infinities."""
    return log_p if math.isfinite(log_p) else None
