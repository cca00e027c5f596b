"""Engines of vLLM for tests with the marker `vllm`, and the comparison of their chains with those of another engine."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.interface import Finished
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.delegated.elsewhere import UnloadedTarget
from dflash_mcmc.engine.vllm.core import VllmEngine, arguments, shared
from dflash_mcmc.types import ChainResult

TOLERANCE = 1e-4


def target_of(model, folder: Path, stop_ids: Iterable[int], max_positions: int = 192) -> UnloadedTarget:
    """The target of a model without a tokenizer, whose checkpoint is written to a folder."""
    model.save_pretrained(folder)
    return UnloadedTarget(folder, "float32", "cpu", model.config, None, max_positions, model.config.vocab_size,
                      tuple(sorted(stop_ids)), ())


def saved(model: LanguageModel, folder: Path) -> UnloadedTarget:
    """The target of a loaded model, with its stop ids and forbidden ids, whose checkpoint is in a folder."""
    return UnloadedTarget(folder, "float32", "cpu", model.config, model.tokenizer, model.max_positions, model.vocab_size,
                      model.stop_ids, tuple(np.flatnonzero(model.forbidden.numpy()).tolist()))


def engine_of(target: UnloadedTarget, num_chains: int = 16, skip_identical: bool = True, **changes) -> VllmEngine:
    """An engine on the CPU. The same settings share a loaded model."""
    values = dict(model=str(target.folder), dtype=target.dtype, max_model_len=target.max_positions, max_num_seqs=16,
                  forbidden=target.forbidden, kv_cache_bytes=100_000_000, block_size=32, enforce_eager=True)
    return VllmEngine(target, shared(arguments(**{**values, **changes})), num_chains, skip_identical)


class Comparison(NamedTuple):
    """How many chains are equal, and the largest difference of their log-probabilities."""

    chains: int
    equal: int
    log_p: float
    log_q: float

    @staticmethod
    def of(found: dict[object, Finished], expected: Callable[[object], ChainResult]) -> "Comparison":
        """Compares chains by their tags."""
        equal, log_p, log_q = 0, [0.0], [0.0]
        for tag, done in found.items():
            a, b = done.result, expected(tag)
            assert a is not None, done.failure
            if a.trajectory.tokens.tolist() != b.trajectory.tokens.tolist():
                continue
            equal += (a.proposals, a.accepted, a.moved, a.trajectory.ended) == (b.proposals, b.accepted, b.moved,
                                                                               b.trajectory.ended)
            log_p.append(float(np.abs(a.trajectory.log_p - b.trajectory.log_p).max(initial=0.0)))
            log_q.append(float(np.abs(a.trajectory.log_q - b.trajectory.log_q).max(initial=0.0)))
        return Comparison(len(found), equal, max(log_p), max(log_q))
