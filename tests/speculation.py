"""Exact laws of speculative decoding on the tabular engine."""

from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative.rules import Speculation
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.testing import PROMPT, law_of, product_target, total_variation
from dflash_mcmc.types import Trajectory

HORIZON, VOCABULARY = 3, 4
MODEL = TabularModel(VOCABULARY, (0,), seed=3, scale=1.5)
DRAFTS = {
    "parallel": TabularDraft(VOCABULARY, 2, seed=3),
    "sequential": TabularDraft(VOCABULARY, 2, sequential=True, seed=5),
    "long": TabularDraft(VOCABULARY, 4, seed=6, scale=2.0),
    "point": TabularDraft(VOCABULARY, 2, has_density=False, seed=3),
}
SMALL = TabularModel(3, (0,), seed=3, scale=1.5)
DRAFTS |= {"small": TabularDraft(3, 2, seed=2), "small_sequential": TabularDraft(3, 2, sequential=True, seed=5)}
"""Drafts with three tokens, for laws over several blocks and for faults. With four tokens these tests take minutes."""
LAWS = {
    "temperature": SamplingParams(0.8),
    "filters": SamplingParams(1.2, top_k=3, top_p=0.9, min_p=0.05),
    "penalty": SamplingParams(0.9, repetition_penalty=1.7),
    "greedy": SamplingParams(0.0),
    "counts": SamplingParams(0.9, frequency_penalty=0.9, presence_penalty=0.7),
    "prompt": SamplingParams(0.9, frequency_penalty=0.9, presence_penalty=0.7, counts_prompt=True),
}


def combinations(temperatures: tuple[float | None, ...], slow: float | None) -> list:
    """Combinations of draft, temperature and law, without those that take seconds, with `temperature == slow`."""
    return [(draft, temperature, law) for draft in ("parallel", "sequential", "point") for temperature in temperatures
            for law in ("temperature", "filters", "penalty", "greedy")
            if draft == "point" or temperature != slow or law in ("filters", "greedy")]


def speculative_error(speculation: Speculation, law: SamplingParams, horizon: int = HORIZON,
                      model: TabularModel = MODEL) -> float:
    """Total variation between the law of a speculative draw and the law of plain decoding."""
    engine = TabularEngine(model, None, speculation)
    drawn = law_of(lambda key: engine.answer(Draw(Trajectory.start(PROMPT), horizon, law, key)))
    return total_variation(drawn, product_target(TabularEngine(model), horizon, law))


def differing(speculation: Speculation, law: SamplingParams, num_seeds: int, horizon: int = 6) -> int:
    """Number of seeds, out of `num_seeds`, whose tokens differ from those of plain decoding."""
    speculative, plain = TabularEngine(MODEL, None, speculation), TabularEngine(MODEL)
    count = 0
    for seed in range(num_seeds):
        draw = Draw(Trajectory.start(PROMPT), horizon, law, Key(seed))
        count += speculative.answer(draw).tokens.tolist() != plain.answer(draw).tokens.tolist()
    return count
