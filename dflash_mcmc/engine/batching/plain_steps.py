"""Decode steps that draw one token per row.

On a GPU a step can be captured once and replayed (`graphs.py`). For this reason it never reads a value on the host, never
makes a tensor from host data, and has no shape that depends on values. Steps with a draft for every token
(`speculative/block_grid.py`) are an exception.
"""

from __future__ import annotations

import torch

from dflash_mcmc.engine.batching import logits_processor as laws
from dflash_mcmc.engine.batching.cache import SlotCache
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.batching.rows import Group, RowCounts, Rows, SharedForwards, Status, columns_of_groups
from dflash_mcmc.engine.speculative.commit import below_floor
from dflash_mcmc.engine.speculative.drafter import DraftStates

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(tokens, log q, intervals): int64 (rows,), float64 (rows,), float64 (rows, 2)."""


def plain_cost(tokens: int, counts: RowCounts) -> dict[str, int]:
    """The cost of a draw of `tokens` tokens by steps without a decoder, by the names of `Cost`."""
    return {"tokens_drawn": tokens, "target_forwards": counts.rounds, "token_forwards": counts.fed,
            "blocks_drafted": counts.blocks}


class PlainSteps:
    """Draws one token for every live row in each step, with one forward of the target."""

    tokens_a_step = 1

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.reach = runner.grid.block_size if runner.grid else 1

    def cost(self, group: Group, tokens: int, counts: RowCounts) -> dict[str, int]:
        """See `Stepper.cost`."""
        return plain_cost(tokens, counts)

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: SharedForwards | None = None) -> None:
        """One token for every live row among the first `batch`, and for the riders; see `Stepper.step`."""
        rows, position = state.ids[:batch], state.position[:batch]
        fed = state.tokens[rows, position][:, None]
        said = self._said(cache, state, batch, key_length, groups)
        hidden = self.runner.forward(cache, slice(0, batch), fed, position[:, None], key_length)[:, 0]
        sources = {group.source for group in groups}
        logits = self.runner.logits(hidden, [tap[:, 0] for tap in self.runner.tapped], sources, said)
        if riders is not None:
            batch = riders.batch
            rows, position = state.ids[:batch], state.position[:batch]
            logits = _ridden(logits, riders)
        target = laws.weigh(logits["blended"])
        failed = ~torch.isfinite(target.maximum[:, 0])
        for values in list(logits.values())[1:]:
            failed |= ~torch.isfinite(values.amax(dim=-1))
        history = state.history(batch)
        tokens, log_q, interval = _draw(logits, target, state.uniforms[rows, position + 1], groups, history)
        failed |= ~torch.isfinite(log_q)  # processed logits that are not finite give no number
        log_p = target.log_probability(tokens)
        scores = torch.cat([log_p[:, None], log_q[:, None], interval], dim=1)
        further = columns_of_groups(groups, tokens, logits, target, history, 1, state.columns.shape[2])
        if further is not None:
            failed |= further.isnan().any(dim=1)
        self._write(state, batch, failed, tokens, scores, further, floors)
        if riders is not None:
            _part(state, riders, tokens)

    def _said(self, cache: SlotCache, state: Rows, batch: int, key_length: int,
              groups: tuple[Group, ...]) -> DraftStates | None:
        """The draft's hidden states for the next tokens; None if no row needs them."""
        grid = self.runner.grid
        if grid is None or not (self.runner.on_grid or any(group.source == "draft" for group in groups)):
            return None
        return grid.at_step(cache, state, batch, key_length)

    def _write(self, state: Rows, batch: int, failed: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor,
               further: torch.Tensor | None, floors: bool) -> None:
        """Writes the drawn tokens and advances the live rows. Other rows do not change."""
        rows, at, status = state.ids[:batch], state.position[:batch] + 1, state.status[:batch]
        live = status == Status.LIVE
        drawn = live & ~failed
        where = torch.where(drawn, at, state.nowhere)
        state.tokens[rows, where], state.scores[rows, where] = tokens, scores
        if further is not None:
            state.columns[rows, where] = further
        if len(state.seen):
            state.seen[rows, tokens] = state.seen[rows, tokens] | drawn
        if len(state.counts):
            state.counts[rows, tokens] = state.counts[rows, tokens] + drawn
        state.position[:batch] += drawn
        state.work[:, :batch] += live
        ended = self._ends(state, tokens, at, drawn)
        found = Status.DONE * ended
        if floors:
            below = _below_floor(state, batch, drawn, at, scores)
            found = torch.where(ended, found, Status.ABANDONED * below)
        found = torch.where(failed, Status.FAILED, found)
        state.status[:batch] = torch.where(live, found, status)

    def _ends(self, state: Rows, tokens: torch.Tensor, at: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Whether the token of each row ends its draw, bool (rows,). Advances the stop strings of rows that have drawn."""
        endings = self.runner.endings
        states = endings.states(state, tokens[:, None], drawn[:, None])
        if states is not None:
            state.matched[: len(tokens)] = states[:, 0]
        return endings.ends(state, tokens[:, None], at[:, None], states)[:, 0]


def _ridden(logits: dict[str, torch.Tensor], riders: SharedForwards) -> dict[str, torch.Tensor]:
    """The logits of all rows that draw. A rider has those of its leader. Sources that share a tensor still share one."""
    found = {id(values): values[riders.leader] for values in logits.values()}
    return {name: found[id(values)] for name, values in logits.items()}


def _part(state: Rows, riders: SharedForwards, tokens: torch.Tensor) -> None:
    """Parts live riders from leaders that have drawn another token or have ended."""
    status = state.status[: riders.batch]
    apart = (tokens != tokens[riders.leader]) | (status[riders.leader] != Status.LIVE)
    state.status[: riders.batch] = torch.where((status == Status.LIVE) & apart, Status.DIVERGED, status)


def _below_floor(state: Rows, batch: int, drawn: torch.Tensor, at: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Adds the tokens' weights, and returns which rows may be abandoned."""
    gain = state.alpha[:batch] * scores[:, 0] - scores[:, 1]
    state.weight[:batch] += torch.where(drawn, gain, 0.0)
    return below_floor(state, at[:, None], state.weight[:batch, None])[:, 0]


def _draw(logits: dict[str, torch.Tensor], target: laws.Weights, uniforms: torch.Tensor, groups: tuple[Group, ...],
          history: laws.History) -> Drawn:
    """Draws of all rows, each by its own group."""
    if len(groups) == 1:
        return _draw_group(groups[0], logits[groups[0].source], uniforms, history, target)
    tokens = torch.zeros_like(uniforms, dtype=torch.int64)
    log_q, interval = torch.zeros_like(uniforms), torch.zeros_like(uniforms)[:, None].repeat(1, 2)
    for group in groups:
        mine = group.members()
        tokens[mine], log_q[mine], interval[mine] = _draw_group(
            group, logits[group.source][mine], uniforms[mine], history.of_rows(mine), None)
    return tokens, log_q, interval


def _draw_group(group: Group, logits: torch.Tensor, uniforms: torch.Tensor, history: laws.History,
                target: laws.Weights | None) -> Drawn:
    """Draws of the rows of one group.

    Args:
        target: the target's weights if the group has all rows of the batch, else None.
    """
    processed = laws.process(logits, group.params, history)
    if group.params.temperature == 0.0:
        tokens = laws.argmax(processed)
        certain = processed.gather(1, tokens[:, None])[:, 0].double()  # 0
        return tokens, certain, torch.stack([certain, certain + 1.0], dim=1)
    # A draw from the target itself uses the target's weights, which are known.
    weights = target if target is not None and processed is target.logits else laws.weigh(processed)
    tokens, interval = laws.draw(weights, uniforms)
    return tokens, weights.log_probability(tokens), interval
