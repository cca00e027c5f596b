"""Decode steps captured as CUDA graphs and replayed: on a GPU a small step takes as long as the launches of its kernels.

A graph has fixed shapes. So on a GPU the engine uses a short ladder of batches and key lengths, and captures each shape when
it is first needed. Steps run without a graph if rows draw with different sampling parameters, or share forwards.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dflash_mcmc.engine.batching.cache import SlotCache
from dflash_mcmc.engine.batching.rows import Group, Rows, SharedForwards, Status, Stepper
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.errors import note

_WARM_UPS = 2


def graphed(stepper: Stepper, reason: str | None, endings: Endings) -> Stepper:
    """The stepper with graphs. If there is a reason against them, it is the stepper itself, with a note once in a process."""
    if reason is None:
        return GraphedSteps(stepper, endings)
    _note(reason)
    return stepper


@cache
def _note(reason: str) -> None:
    note(f"hardware.cuda_graphs: decode steps run without CUDA graphs, because {reason}")


class GraphedSteps:
    """Replays the steps of another stepper, with a graph for each batch, key length and group.

    A graph reads the tensors that it was captured with. Graphs are therefore captured again after `endings` has others.
    """

    def __init__(self, stepper: Stepper, endings: Endings):
        self._stepper, self.cost, self._endings, self._version = stepper, stepper.cost, endings, endings.version
        self.tokens_a_step, self.reach = stepper.tokens_a_step, stepper.reach
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def step(self, cache: SlotCache, state: Rows, batch: int, key_length: int, groups: tuple[Group, ...],
             floors: bool, riders: SharedForwards | None = None) -> None:
        """See `Stepper.step`."""
        if len(groups) > 1 or riders is not None:
            self._stepper.step(cache, state, batch, key_length, groups, floors, riders)
            return
        if self._version != self._endings.version:
            self._graphs.clear()
            self._version = self._endings.version
        name = (batch, key_length, groups[0], floors, len(state.seen), len(state.counts), state.columns.shape[2])
        if name not in self._graphs:
            self._graphs[name] = self._capture(cache, state, batch, key_length, groups, floors)
        self._graphs[name].replay()

    def _capture(self, *arguments) -> torch.cuda.CUDAGraph:
        state = arguments[1]
        status = state.status.clone()
        state.status.fill_(Status.DONE)  # the warm-up has no effect, because a step changes only live rows
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._stepper.step(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._stepper.step(*arguments)
        self._pool = self._pool or graph.pool()
        state.status.copy_(status)
        return graph
