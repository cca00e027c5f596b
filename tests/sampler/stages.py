"""The law of a chain from its stages, and how far a step is from the power law, with matrices of the tabular engine."""

from typing import Any

import numpy as np

from dflash_mcmc.engine.oracle.tabular import TabularEngine
from dflash_mcmc.testing import Target, balance_error, invariance_error, power_target, product_target, transition_matrix


def step_matrix(engine: TabularEngine, sampler: Any, horizon: int) -> tuple[np.ndarray, Target]:
    """The transition matrix of a step, and the power target of the sampler's law."""
    target = power_target(engine, horizon, sampler.alpha, sampler.law(), sampler.source())
    return transition_matrix(engine, sampler, horizon, target), target


def matrix_error(matrix: np.ndarray, target: Target) -> float:
    """The largest violation of invariance and detailed balance by a matrix, and of a sum of 1 by its rows."""
    rows = float(np.abs(matrix.sum(axis=1) - 1.0).max())
    return max(rows, invariance_error(matrix, target), balance_error(matrix, target))


def step_error(engine: TabularEngine, sampler: Any, horizon: int) -> float:
    """The error of the matrix of a step."""
    return matrix_error(*step_matrix(engine, sampler, horizon))


def extended(engine: TabularEngine, sampler: Any, law: dict, horizon: int) -> dict:
    """The law after each sequence without a stop id is continued by q up to the horizon."""
    whole, found = product_target(engine, horizon, sampler.law(), sampler.source()), dict[tuple, float]()
    for tokens, probability in law.items():
        ended = len(tokens) > 0 and tokens[-1] in engine.model.stop_ids
        later = {tokens: 1.0} if ended else {t: q for t, q in whole.items() if t[: len(tokens)] == tokens}
        for longer, q in later.items():
            found[longer] = found.get(longer, 0.0) + probability * q / sum(later.values())
    return found


def stepped(engine: TabularEngine, sampler: Any, law: dict, horizon: int) -> dict:
    """The law after the steps of a stage, by the transition matrix of a step."""
    matrix, target = step_matrix(engine, sampler, horizon)
    vector = np.array([law.get(state, 0.0) for state in target.states]) @ np.linalg.matrix_power(matrix, sampler.num_steps)
    return dict(zip(target.states, vector.tolist(), strict=True))
