"""The draw of a step on a GPU, on a CPU: its kernels in Triton's interpreter against PyTorch's draw, and what a step launches.

Functions `interpreted_...` are tests of a process of their own; see `test_gpu_layers.py`.
"""

import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.rows import Group, Rows, Status
from dflash_mcmc.engine.batching.stop_strings import Endings
from dflash_mcmc.engine.speculative.steps import PlainSteps
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.rng import Key
from tests.cases import quick
from tests.engine.batching.test_gpu_layers import Launches, compiles, launches, triton

gpu_draw, tl = importlib.import_module("dflash_mcmc.engine.batching.gpu"), triton.language

ROWS, LENGTH = 8, 6
STOP_IDS = (5, 11, 40)


def plain(endings: Endings, takes_ranges: bool = True) -> PlainSteps:
    """Steps of a runner that runs no model."""
    runner: Any = SimpleNamespace(endings=endings, grid=None, model=SimpleNamespace(takes_ranges=takes_ranges), tapped=[])
    return PlainSteps(runner)


def rows_of(size: int, seed: int = 0, num_rows: int = ROWS, length: int = LENGTH) -> Rows:
    """Live rows and an idle one, at several positions, some of which are the last."""
    state = Rows(num_rows, length, size, torch.device("cpu"))
    state.status.fill_(Status.LIVE)
    state.status[-1] = Status.DONE
    state.position.copy_(torch.arange(num_rows) % (length - 2))
    state.last.copy_(torch.where(torch.arange(num_rows) == 3, state.position + 1, length))
    state.uniforms.copy_(torch.from_numpy(Key(seed).uniforms(0, num_rows * length)).view(num_rows, length))
    return state


def strings_of(endings: Endings, size: int) -> list[int]:
    """Adds a stop string: two tokens with ids that 3 divides. Returns the states of a row before it and inside it."""
    strings: Any = SimpleNamespace(strings=("two",), classes=(np.arange(size) % 3 == 0).astype(np.int32),
                                   table=np.array([[0, 2], [1, 1], [0, 1]], dtype=np.int32), state=lambda tokens: len(tokens))
    endings._compiled = lambda stop: strings
    draw: Any = SimpleNamespace(stop=strings.strings)
    return [endings.begin(draw, np.zeros(tokens)) for tokens in (0, 2)]


def both(logits: torch.Tensor, state: Rows, groups: list[Group], endings: Endings) -> list[Rows]:
    """The states after a draw by the kernels and by PyTorch, which are compared."""
    found = []
    for kernels in (True, False):
        mine = Rows(state.num_rows, state.tokens.shape[1], state.vocab_size, state.device)
        for name in ("tokens", "uniforms", "scores", "_whole", "_real"):
            getattr(mine, name).copy_(getattr(state, name))
        mine.seen, mine.counts, mine.has_floors = state.seen.clone(), state.counts.clone(), state.has_floors
        tokens = (gpu_draw.drawn(mine, logits, groups, endings) if kernels else
                  plain(endings)._drawn(mine, {"blended": logits}, tuple(groups)))
        mine.tokens[:, mine.nowhere] = 0  # PyTorch writes there what no row keeps
        mine.scores[:, mine.nowhere] = 0
        found.append((mine, tokens))
    (ours, tokens), (theirs, expected) = found
    alive = theirs.status != Status.FAILED
    assert tokens[alive].tolist() == expected[alive].tolist()
    for name in ("tokens", "_whole", "seen", "counts"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("scores", "_real"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=2e-6, rtol=1e-6, equal_nan=True)
    return [ours, theirs]


def groups_of(*laws: SamplingParams) -> list[Group]:
    """One group of all rows, or a group of every second row each."""
    if len(laws) == 1:
        return [Group(laws[0], "blended", None)]
    return [Group(law, "blended", torch.arange(number, ROWS, len(laws))) for number, law in enumerate(laws)]


LAWS = {
    "temperature 1": (SamplingParams(),), "alpha 4": (SamplingParams(0.25),), "hot": (SamplingParams(1.7),),
    "greedy": (SamplingParams(0.0),), "cut": (SamplingParams(0.7, top_k=20, top_p=0.9, min_p=0.01),),
    "penalties": (SamplingParams(0.8, repetition_penalty=1.4, frequency_penalty=0.3),),
    "greedy penalties": (SamplingParams(0.0, presence_penalty=0.5),),
    "two groups": (SamplingParams(0.5), SamplingParams(0.0, temperature_last=True)),
}


@pytest.mark.parametrize(("law", "size"), quick([
    *((law, 61) for law in LAWS), *((law, 2600) for law in ("alpha 4", "cut", "greedy penalties", "two groups"))],
    ("temperature 1", 61), ("penalties", 61), ("cut", 2600)))
def interpreted_draws_are_those_of_pytorch(law, size):
    """With a row of logits that are no numbers, an infinite one, one without any, and ties for the most likely token."""
    state, endings = rows_of(size), Endings(STOP_IDS, None, torch.device("cpu"), None)
    logits = 3.0 * torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size))
    logits[0, 5], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[4, [7, size - 1]] = 20.0
    logits[5, : size // 2] = -torch.inf
    if any(params.has_penalty for params in LAWS[law]):
        for row in range(ROWS):
            state.mark_seen(row, np.array([row, 7, 30]))
            state.set_counts(row, np.array([row, 7, 7]))
    ours, _ = both(logits, state, groups_of(*LAWS[law]), endings)
    assert ours.status[:4].tolist() == [Status.FAILED] * 3 + [Status.DONE]
    assert ours.rounds.tolist() == ours.fed.tolist() == [1] * (ROWS - 1) + [0]


@pytest.mark.parametrize("has_strings", [False, True])
@pytest.mark.parametrize("stop_ids", [pytest.param((), marks=pytest.mark.slow), STOP_IDS])
def interpreted_draws_end_where_those_of_pytorch_do(has_strings, stop_ids):
    """Over a few steps: stop ids, stop strings, last positions, and floors with and without a length."""
    state, endings, size = rows_of(61, 1), Endings(stop_ids, None, torch.device("cpu"), None), 61
    generator = torch.Generator().manual_seed(3)
    state.position.fill_(0)
    state.origin.fill_(1)
    if has_strings:
        state.matched.copy_(torch.tensor(strings_of(endings, size) * (ROWS // 2)))
    state.alpha.fill_(2.0)
    state.floor.copy_(torch.tensor([-1.0, -2.0, -4.0, -torch.inf] * 2))
    state.log_length.copy_(torch.tensor([-torch.inf] * 4 + [1.5] * 4))
    state.has_floors, seen = True, set[int]()
    for _ in range(4):
        logits = 2.0 * torch.randn(ROWS, size, generator=generator)
        logits[:, list(STOP_IDS)] += 2.0
        state = both(logits, state, groups_of(SamplingParams(0.9)), endings)[1]
        seen |= set(state.status.tolist())
    assert seen == {Status.LIVE, Status.DONE, Status.ABANDONED}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def interpreted_law_is_that_of_the_logits(temperature):
    """By all uniforms of a grid: each token has its share of them. A toy of seven tokens."""
    count, logits = 250, torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.0, 1.1, -3.0])
    state = rows_of(7, num_rows=count, length=4)
    state.status.fill_(Status.LIVE)
    state.position.fill_(0)
    state.uniforms[:, 1] = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    endings, groups = Endings((), None, state.device, None), groups_of(SamplingParams(temperature))
    tokens = gpu_draw.drawn(state, logits.repeat(count, 1), groups, endings)
    law = torch.softmax(logits.double() / temperature, dim=0)
    assert float((torch.bincount(tokens, minlength=7) / count - law).abs().max()) <= 1 / count
    log_p = torch.log_softmax(logits.double(), dim=0)
    torch.testing.assert_close(state.scores[:, 1, 0], log_p[tokens], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(state.scores[:, 1, 1], law.log()[tokens], atol=1e-6, rtol=1e-6)
    upto = law.cumsum(0)
    torch.testing.assert_close(state.scores[:, 1, 2:], torch.stack([upto - law, upto], 1)[tokens], atol=1e-6, rtol=0)


def interpreted_borders_belong_to_the_token_after_them():
    """Weights are powers of two, so that sums are exact and uniforms lie on borders. No token of probability zero is drawn."""
    size = 1024
    logits = torch.full((ROWS, size), -torch.inf)
    logits[:, [3, 4, 700, 900]] = 0.0
    state = rows_of(size)
    state.status.fill_(Status.LIVE)
    state.position.fill_(0)
    state.uniforms[:, 1] = torch.tensor([2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53, 0.25 - 2.0**-53, 0.5 - 2.0**-53, 0.6],
                                           dtype=torch.float64)
    ours, _ = both(logits, state, groups_of(SamplingParams()), Endings((), None, state.device, None))
    assert ours.tokens[:, 1].tolist() == [3, 4, 700, 900, 900, 3, 4, 700]


@triton.jit
def _chosen(point, upto, weights, found, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(found, gpu_draw._first_above(point, tl.load(upto + at), tl.load(weights + at), at, SIZE))


@pytest.mark.parametrize(("point", "last", "place"), [(0.25, 1, 2), (0.375, 1, 2), (0.625, 1, 3), (2, 1, 3), (2, 0, 2)])
def interpreted_borders_that_rounding_has_moved_give_no_token_of_probability_zero(point, last, place):
    """A scan in parallel may put a sum above the next one, though the token between has no weight."""
    upto, weights = torch.tensor([0.25, 0.5, 0.5, 1.0]).double(), torch.tensor([0.25, 0.0, 0.25, last]).double()
    found = torch.zeros(1, dtype=torch.int64)
    _chosen[(1,)](point, upto, weights, found, 4)
    assert found.item() == place


def launched(rows: int, takes_ranges: bool, floors: bool, params: SamplingParams, strings: bool = False) -> Launches:
    """What a step at Qwen3-4B's vocabulary launches, without its forward. Tensors have no memory."""
    device, cache = torch.device("meta"), object.__new__(KVCache)
    with device, torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        state, endings = Rows(rows, 1024, 151_936, device), Endings(STOP_IDS, None, device, None)
        steps, state.has_floors = plain(endings, takes_ranges), floors
        if strings:
            strings_of(endings, 151_936)
        if params.has_penalty:
            state.seen, state.counts = torch.zeros(rows, 151_936, dtype=torch.bool), torch.zeros(rows, 151_936)
        hidden, logits = torch.zeros(rows, 1, 2560, dtype=torch.bfloat16), torch.zeros(rows, 151_936)
        patch.setattr(steps.runner, "forward", lambda *given: hidden, raising=False)
        patch.setattr(steps.runner, "logits", lambda *given: {"blended": logits}, raising=False)
        with Launches(patch) as found:
            steps.step(cache, state, rows, 1024, (Group(params, "blended", None),))
    return found


@pytest.mark.parametrize("floors", [False, True])
@pytest.mark.parametrize(("temperature", "beside"), [(1.0, {}), (0.25, {}), (0.0, {
    "amax": 1, "max": 1, "full_like": 1, "sub": 1, "scatter_": 1})])
def test_a_draw_launches_three_kernels_and_reads_nothing_on_the_host(floors, temperature, beside):
    """Beside the largest logit, and the token that is fed."""
    found = launched(8, True, floors, SamplingParams(temperature))
    assert len(found.ours) == 2
    assert found.theirs == Counter({"index": 1, "amax": 1}) + Counter(beside)


@pytest.mark.parametrize(("rows", "most"), [(1, 372), (8, 372), (64, 336)])
def test_a_step_of_36_layers_launches_375_kernels(rows, most):
    """With the clamp of the position, and the two of the head (product and bias)."""
    parts = [launches(rows, 1, 36), launched(rows, True, True, SamplingParams(0.25))]
    assert sum(len(part.ours) + part.theirs.total() for part in parts) == most


def test_pytorch_draws_where_its_modules_run():
    found = launched(8, False, False, SamplingParams())
    assert not found.ours
    assert found.theirs.total() > 50


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_the_draw_compile_for_gpus_without_spilling_registers(capability, monkeypatch, tmp_path):
    laws = (SamplingParams(), SamplingParams(2), SamplingParams(0.8, repetition_penalty=1.2, frequency_penalty=0.1))
    found = [launch for law in laws for launch in launched(8, True, True, law, law.has_penalty).ours]
    assert compiles(found, capability, monkeypatch, tmp_path) == {"_weigh", "_draw"}
