"""Schedules of the learning rate, as functions of the step. All begin with a linear warm-up."""

from __future__ import annotations

import math


def stable_then_linear(step: int, steps: int, peak: float, warmup_steps: int, decay_fraction: float) -> float:
    """Warm-up, a constant rate, and a linear decay to zero over the last part of the run.

    Source: Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training durations".
    """
    decay_start = steps * (1 - decay_fraction)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step < decay_start:
        return peak
    return peak * (steps - step) / (steps - decay_start)


def cosine(step: int, steps: int, peak: float, warmup_fraction: float) -> float:
    """Warm-up over the first part of the run, then half a cosine down to zero (Loshchilov & Hutter 2017)."""
    warmup_steps = math.ceil(steps * warmup_fraction)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))
