"""`sampler.function`: laws of a token by a function of the user, on the tabular engine and in a batch of the tiny target."""

import itertools
import runpy

import numpy as np
import pytest
import torch

from dflash_mcmc import ops
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw, SamplingParams, Score
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.temperature import Temperature
from dflash_mcmc.testing import law_of, total_variation
from dflash_mcmc.types import ChainResult, Trajectory
from tests.conftest import ROOT
from tests.targets import random_model

EXAMPLES = ROOT / "docs/examples/laws.py"
HORIZON, VOCAB = 3, 4


@pytest.fixture(scope="module")
def model():
    return LanguageModel(random_model("qwen3"))


def drawn(model, chains: list[ops.Chain], num_slots: int) -> list[Trajectory]:
    done = {each.tag: each.result.trajectory for each in BatchedEngine(model, None, num_slots, 16).run(enumerate(chains))}
    return [done[number] for number in range(len(chains))]


def by_hand(name: str, p: dict[int, float], text: tuple[int, ...]) -> dict[int, float]:
    """The law of a token from its probabilities under the target, by the definition of each example."""
    if name == "xtc":
        above = [x for x in p if p[x] >= 0.1]
        kept = {x: 0.0 if x in above and x != min(above, key=p.get) and len(above) > 1 else p[x] for x in p}
        return {x: 0.5 * p[x] + 0.5 * kept[x] / sum(kept.values()) for x in p}
    if name == "dry":
        runs = {x: max((n for n in range(len(text)) for end in range(n, len(text))
                        if text[end] == x and text[end - n : end] == text[len(text) - n :]), default=0) for x in p}
        weights = {x: p[x] * np.exp(-0.8 * 1.75 ** (runs[x] - 2)) if runs[x] >= 2 else p[x] for x in p}
    elif name == "min_k":
        order = sorted(p, key=p.get, reverse=True)
        drops = [np.log(p[a] / p[b]) / rank for rank, (a, b) in enumerate(itertools.pairwise(order), start=1)]
        weights = {x: p[x] if x in order[: drops.index(max(drops)) + 1] else 0.0 for x in p}
    elif name == "bias":
        weights = {x: p[x] * (np.exp(2.0) if x == 1 else 1.0) for x in p}
    else:
        weights = {x: p[x] if x in (1, 2) else 0.0 for x in p}
    return {x: weight / sum(weights.values()) for x, weight in weights.items()}


@pytest.mark.parametrize("name", ["xtc", "dry", "min_k", "bias", "grammar"])
def test_the_law_of_each_example_is_the_product_of_its_tokens(name, tmp_path):
    """Against a definition of each in plain Python; the law of the target alone is another one."""
    model, prompt = TabularModel(VOCAB, (), seed=4), np.array([1, 2, 1, 2])
    more = {"bias": ", token=1", "grammar": ", allowed=(1, 2)"}.get(name, "")
    law = tmp_path / "law.py"
    law.write_text(f"import runpy\nexample = runpy.run_path({str(EXAMPLES)!r})[{name!r}]\n\n"
                   f"def law(logits, text):\n    return example(logits, text{more})\n")

    def law_under(sampler: Temperature) -> dict:
        return law_of(lambda key: TabularEngine(model).run(sampler.chain(prompt, HORIZON, key)).trajectory)

    expected = {(): 1.0}
    for _ in range(HORIZON):
        longer = {}
        for path, mass in expected.items():
            text = (*prompt.tolist(), *path)
            logits = np.asarray(model.logits(text, "last"), dtype=np.float64)
            p = dict(enumerate((np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()).tolist()))
            longer |= {(*path, x): mass * q for x, q in by_hand(name, p, text).items() if q > 0.0}
        expected = longer
    assert total_variation(law_under(Temperature(function=f"{law}:law")), expected) < 1e-7  # float32 logits
    assert total_variation(law_under(Temperature(temperature=1.0)), expected) > 1e-3


def test_each_row_of_a_batch_reads_its_own_text(model):
    """Chains of other lengths beside it, and one without a function: a function sees every prefix of its own sequence once
    for each token, log q is that of its weights, and scores of the same tokens are equal."""
    read: list[tuple[int, ...]] = []

    def law(logits: torch.Tensor, text: np.ndarray) -> torch.Tensor:
        read.append(tuple(text.tolist()))
        logits[int(text[-1])] -= 3.0
        return logits

    prompts = [np.array([5, 6]), np.array([7, 8, 9, 10]), np.array([11])]

    def chain(number: int) -> ops.Chain:
        params = SamplingParams() if number == 2 else SamplingParams(function=law)
        path = yield Draw(Trajectory.start(prompts[number]), 4 + number, params, Key(3).fold_in("token", number))
        scored = yield Score(Trajectory.start(prompts[number]), path.tokens, params)
        assert np.abs(scored.log_q - path.log_q).max() < 1e-5
        return ChainResult(path)

    paths = drawn(model, [chain(number) for number in range(3)], 3)
    own = {tuple(np.concatenate([prompts[number], paths[number].tokens[:count]]).tolist())
           for number in (0, 1) for count in range(paths[number].length)}
    assert set(read) == own
    assert all(read.count(text) == 2 for text in own)  # one draw, one score
    assert np.abs(paths[0].log_q - paths[0].log_p).max() > 1e-3
    assert np.array_equal(paths[2].log_q, paths[2].log_p)


@pytest.mark.parametrize(("returned", "says"), [
    ("logits[:3]", "returns (3,) at token 1, or nothing that can be drawn; allowed: 4 log weights, finite or -inf"),
    ("logits * float('nan')", "at token 1, or nothing that can be drawn"), ("None", "returns (0,) at token 1"),
    ("1 / 0", "fails at token 1: ZeroDivisionError")])
def test_a_function_that_is_no_law_is_one_line(returned, says, tmp_path, model):
    law = tmp_path / "law.py"
    law.write_text(f"def law(logits, text):\n    return {returned}\n")
    sampler = Temperature(function=f"{law}:law")
    says = says.replace(": 4 log", f": {model.vocab_size} log")
    with pytest.raises(UserError, match=r"^sampler\.function: ") as error:
        drawn(model, [sampler.chain(np.array([5]), 2, Key(0))], 1)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_examples_have_no_state():
    """Called twice for the same place they return the same weights, and the ids are not changed."""
    text, logits = np.array([3, 4, 3, 4, 3]), torch.linspace(-2.0, 2.0, 16)
    for name in ("xtc", "dry", "min_k", "bias", "grammar"):
        law = runpy.run_path(str(EXAMPLES))[name]
        first, second = (law(logits.clone(), text) for _ in range(2))
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    assert text.tolist() == [3, 4, 3, 4, 3]
