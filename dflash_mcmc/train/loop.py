"""The loop of optimiser steps, with checkpoints. A run that is stopped and started again ends with the same weights.

This requires that everything that determines step n (texts, anchors, learning rate) is a function of n. A checkpoint holds
the weights, the optimiser's state and the number of steps. It is written at every evaluation.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from dflash_mcmc.errors import RunBusy, UserError
from dflash_mcmc.process import bars
from dflash_mcmc.rng import Key
from dflash_mcmc.store.locks import Locks

if TYPE_CHECKING:
    import torch


def cosine(step: int, steps: int, peak: float, warmup_fraction: float) -> float:
    """Warm-up over the first part of the run, then half a cosine down to zero (Loshchilov & Hutter 2017)."""
    warmup_steps = math.ceil(steps * warmup_fraction)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


POOL_BATCHES = 8
"""Number of batches in a pool. The sequences of a pool are sorted by length and then divided into batches."""
T = TypeVar("T")


def cut_by_length(items: Sequence[T], lengths: Sequence[int], size: int, key: Key) -> list[list[T]]:
    """Batches of `size` items of similar length, in random order by `key`. Their number is a multiple of `size`."""
    ordered = [items[i] for i in np.argsort(np.asarray(lengths), kind="stable")]
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return [batches[i] for i in key.uniforms(0, len(batches)).argsort()]


EVALUATIONS = "metrics.jsonl"
_CHECKPOINT = "checkpoint.pt"


class TrainingLoop(NamedTuple):
    """The parts of a training run that the loop needs."""

    name: str
    """Label of the progress bar."""
    folder: Path
    steps: int
    evaluate_every: int
    """Steps between evaluations. Each evaluation writes a checkpoint and a line of `metrics.jsonl`."""
    max_norm: float
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    rate: Callable[[int], float]
    """Learning rate as a function of the step."""
    gradients: Callable[[int], float]
    """Stores the gradients of a step's loss in the parameters and returns the loss in nats."""
    evaluate: Callable[[], dict[str, object]]
    """Computes figures of the current weights, for `metrics.jsonl`."""
    describe: Callable[[dict[str, object]], str]
    """Formats the figures as text for the terminal."""
    track: Callable[[dict[str, float], int], None] = lambda metrics, step: None
    """Receives (metrics, step) after every step (loss and learning rate) and every evaluation."""
    first: bool = True
    """Whether this process writes files and output. One process of a launch does so, because all have the same weights."""


def run(loop: TrainingLoop, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Trains to the end, from the last checkpoint if there is one. Returns the figures of the trained weights.

    Raises RunBusy if another process trains in the folder.
    """
    if not loop.first:
        return _run(loop, module, optimizer)
    with closing(Locks(loop.folder / "lock")) as locks:
        if not locks.take(0):
            raise RunBusy(f"{loop.folder}: another process trains here; allowed: one process, or wait until it ends")
        return _run(loop, module, optimizer)


def _run(loop: TrainingLoop, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    start, losses, figures = restore(loop.folder, module, optimizer), [], {}
    with bars.Bar(loop.steps, "step", loop.name, initial=start, shown=loop.first) as bar:
        for step in range(start, loop.steps):
            losses.append(optimise(loop, module, optimizer, step))
            bar.update(text=f"loss {losses[-1]:.3f}")
            if (step + 1) % loop.evaluate_every == 0 or step + 1 == loop.steps:
                # The evaluation precedes the checkpoint. A run that is stopped between the two repeats the evaluation.
                figures = {"step": step + 1, "loss": sum(losses) / len(losses), **loop.evaluate()}
                losses = []
                if loop.first:
                    save(loop.folder, module, optimizer, figures)
                    bar.write(f"step {step + 1}: loss {figures['loss']:.3f}, {loop.describe(figures)}")
                numbers = {f"evaluation/{name}": value for name, value in figures.items() if isinstance(value, float)}
                loop.track(numbers, step + 1)
    return figures or loop.evaluate()  # nothing was left to train


def optimise(loop: TrainingLoop, module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Takes one optimiser step. Returns its loss in nats. Raises UserError, and changes no weight, if it is not finite."""
    import torch

    rate = loop.rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loop.gradients(step)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), loop.max_norm).item()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(f"learning_rate: given a rate of {rate:g} in step {step + 1}, which has a loss of {loss:g} and a "
                        f"gradient of norm {norm:g}; allowed: a rate with finite ones. The last checkpoint stays as it is")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loop.track({"train/loss": loss, "train/learning_rate": rate}, step + 1)
    return loss


def restore(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restores the last checkpoint. Returns the next step, 0 if there is no checkpoint."""
    import torch

    if not (folder / _CHECKPOINT).is_file():
        return 0
    state = torch.load(folder / _CHECKPOINT, weights_only=True, map_location="cpu")
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def save(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, figures: dict[str, object]) -> None:
    """Replaces the checkpoint atomically and appends the figures to `metrics.jsonl`."""
    import torch

    temporary = folder / f".{_CHECKPOINT}.{os.getpid()}.tmp"
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": figures["step"]}, temporary)
    os.replace(temporary, folder / _CHECKPOINT)
    append_figures(folder, figures)


def append_figures(folder: Path, figures: dict[str, object]) -> None:
    """Appends the figures of an evaluation to `metrics.jsonl`."""
    with (folder / EVALUATIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figures) + "\n")
