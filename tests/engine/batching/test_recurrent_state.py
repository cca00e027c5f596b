"""Models with recurrent layers: states by position, and runs that are equal to the last bit whatever is kept or replayed."""

import functools

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.batching.plan import Workload, predict
from dflash_mcmc.engine.batching.recurrent_state import HybridCache
from dflash_mcmc.errors import UserError
from tests.cases import quick
from tests.engine.batching.test_batched import (
    BLENDS,
    SAMPLERS,
    STOPS,
    SWITCHED,
    TOLERANCE,
    run_batched,
    same,
    same_as_reference,
)
from tests.targets import (
    HYBRIDS,
    RememberingReference,
    queries_do_not_depend_on_the_others,
    random_model,
    rows_do_not_depend_on_the_batch,
)

EVERY = 8
"""Positions between two snapshots. Cuts fall between them."""


@pytest.fixture(scope="module")
def qwen3_5():
    return random_model("qwen3_5")


@pytest.fixture(scope="module")
def plain(qwen3_5):
    """Results of a sampler with default options, drawn once: plain("power_mh")."""
    return functools.cache(lambda name: run_batched(qwen3_5, SAMPLERS[name], BLENDS["layer"], snapshot_every=EVERY))


@pytest.mark.parametrize("family", quick(HYBRIDS, "qwen3_5"))
@pytest.mark.parametrize("name", ["power_mh", pytest.param("power_mh_early", marks=pytest.mark.slow)])
def test_batched_is_reference(family, name):
    """The reference engine runs the layers of `transformers` over whole sequences."""
    model = random_model(family)
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), BLENDS["layer"])
    done = run_batched(model, SAMPLERS[name], BLENDS["layer"], snapshot_every=EVERY)
    same_as_reference(done, SAMPLERS[name], reference)


CHANGES = (SWITCHED["all"], dict(slots=3, order=[5, 2, 9, 7, 0, 3, 6, 8, 1, 4]),
           dict(snapshot_every=1), dict(snapshot_every=256), dict(prefill_chunk=16))


@pytest.mark.parametrize(("name", "changes"), [
    pytest.param(name, changes, id="-".join([name, *changes]),
                 marks=[pytest.mark.slow] * (name != "power_mh" or number != 1))
    for name in ("power_mh", "power_smc", "multiple_try", "replica_exchange") for number, changes in enumerate(CHANGES)])
def test_no_switch_changes_a_bit(qwen3_5, plain, name, changes):
    other = run_batched(qwen3_5, SAMPLERS[name], BLENDS["layer"], **{"snapshot_every": EVERY, **changes})
    for tag, done in plain(name).items():
        same(other[tag].result, done.result, 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE)


class Feeder:
    """A runner over a cache of eight rows, which are fed together."""

    def __init__(self, model, every: int = EVERY):
        self.parts = LanguageModel(model, stop_ids=STOPS)
        self.runner = ModelRunner(self.parts, NoBlend(), "grouped", 64, 64, 64)
        self.cache = HybridCache(self.parts.cache_shape, 8, 64, every=every)

    @torch.inference_mode()
    def step(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Hidden states (8, width) after one token for each row."""
        with self.runner.ready():
            hidden = self.runner.forward(self.cache, slice(0, 8), torch.from_numpy(tokens)[:, None],
                                         torch.from_numpy(positions)[:, None], 64)[:, 0]
        self.cache.passed(positions, positions + 1)
        return hidden

    @torch.inference_mode()
    def read(self, sequence: np.ndarray) -> None:
        """Reads a sequence into all rows, which are empty."""
        with self.runner.ready():
            self.runner.read(self.cache, [Span(row, sequence, 0, len(sequence)) for row in range(8)])

    @torch.inference_mode()
    def roll_back(self, positions: np.ndarray) -> None:
        """Prepares the rows to be fed from these positions on."""
        self.runner.replay(self.cache, list(range(8)), positions.tolist())

    def state(self, row: int, position: int) -> list[torch.Tensor]:
        """The recent state of a row at a position."""
        recent, at = self.cache.recent, position % self.cache.num_recent
        return [recent.windows[:, row, at].clone(), recent.matrices[:, row, at].clone()]


TEXT = np.arange(5, 5 + 23) * 11 % 59


@pytest.fixture
def fed(qwen3_5):
    """Rows that were fed 23 tokens one by one, and their states and outputs at each position."""
    feeder, states, outputs = Feeder(qwen3_5), [], []
    for position, token in enumerate(TEXT):
        states.append(feeder.state(3, position))
        outputs.append(feeder.step(np.full(8, token), np.full(8, position)))
    return feeder, states, outputs


def test_a_row_can_be_rolled_back_to_every_position(fed):
    """States and outputs are those of the row when it was first there, on every processor."""
    feeder, states, outputs = fed
    for position in (22, 17, 16, 15, 9, 8, 3, 1, 0):
        feeder.roll_back(np.full(8, position))
        for mine, first in zip(feeder.state(3, position), states[position], strict=True):
            assert torch.equal(mine, first)
        assert torch.equal(feeder.step(np.full(8, TEXT[position]), np.full(8, position)), outputs[position])


def test_rows_are_rolled_back_each_to_its_own_position(fed):
    feeder, states, _ = fed
    positions = np.array([22, 0, 3, 8, 16, 20, 11, 7])
    feeder.roll_back(positions)
    for row, position in enumerate(positions.tolist()):
        for mine, first in zip(feeder.state(row, position), states[position], strict=True):
            assert torch.equal(mine, first)


def test_states_of_a_text_that_is_read_are_those_of_a_text_that_is_fed(qwen3_5, fed):
    _, states, outputs = fed
    reader = Feeder(qwen3_5)
    reader.read(TEXT[:21])  # a piece of 21 tokens and padding
    exact = queries_do_not_depend_on_the_others()
    for position in (21, 16, 13):
        reader.roll_back(np.full(8, position))
        for mine, first in zip(reader.state(5, position), states[position], strict=True):
            torch.testing.assert_close(mine, first, rtol=0, atol=0 if exact else 1e-5)
    again = reader.step(np.full(8, TEXT[13]), np.full(8, 13))
    torch.testing.assert_close(again, outputs[13], rtol=0, atol=0 if exact else 1e-4)


def test_copies_and_swaps_take_the_states_along(fed):
    feeder, states, _ = fed
    host = feeder.cache.on_host(64)
    host.copy(feeder.cache, 3, 0, 0, 19)
    feeder.cache.clear(1)
    feeder.cache.copy(host, 0, 1, 0, 19)
    feeder.cache.swap(1, 6, 19, 0)
    feeder.cache.clear(2)
    feeder.cache.swap(2, 6, 10, 19)
    for position in (19, 16, 12):
        feeder.roll_back(np.array([0, 0, position, 0, 0, 0, 0, 0]))
        for mine, first in zip(feeder.state(2, position), states[position], strict=True):
            assert torch.equal(mine, first)


def test_caches_are_as_large_as_predicted(qwen3_5):
    model, options = LanguageModel(qwen3_5, stop_ids=STOPS), Options(snapshot_every=20)
    engine = BatchedEngine(model, NoBlend(), 12, 150, options, prompt_length=100)
    memory, rows = engine._memory, engine._loop.rows
    memory.reserve(150)
    memory.spare.reserve(memory.cache.length)
    held = rows.tokens.nbytes + rows.uniforms.nbytes + rows.scores.nbytes
    states = 0
    for cache in (memory.cache, memory.spare, memory.prompts._cache):
        held += cache.keys.nbytes + cache.values.nbytes
        states += cache.inputs.nbytes
        states += sum(kept.windows.nbytes + kept.matrices.nbytes for kept in (cache.snapshots, cache.recent))
    planned = predict(Workload(model, 150, 100, options), 12)
    assert (planned.caches, planned.states) == (held + states, states)
    assert "; recurrent states 5.59 MB; " in planned.describe()


def test_other_recurrent_layers_are_refused(qwen3_5):
    qwen3_5.config.model_type, known = "kimi_linear", qwen3_5.config.model_type
    try:
        with pytest.raises(UserError, match=r"model\.path: .* has linear_attention layers .*; allowed with engine=slots: "):
            LanguageModel(qwen3_5)
    finally:
        qwen3_5.config.model_type = known
