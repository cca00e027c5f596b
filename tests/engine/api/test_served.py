"""Runs through this package's own server: the law, the demo beside engine=slots, potentials, votes, and kills."""

import numpy as np
import pytest
import torch

import dflash_mcmc as dm
from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.engine.api.session import ApiEngine
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.store.records import key_of, read_records
from tests import runs
from tests.engine.api.test_law import drawn, moved, p_value
from tests.serving import Served

TOP, HORIZON = 3, 3


@pytest.fixture(scope="module")
def served():
    """A server that is started with another sampler and blend-free, as `python -m dflash_mcmc.serve condition=ps` is."""
    with Served(["model=tiny", "condition=ps", "serve.port=0", "dataset.max_new_tokens=96", "serve.max_waiting=4096",
                 "hardware.num_slots=16"]) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


def law_of_tiny(prompt: np.ndarray, temperature: float, top: int = TOP, horizon: int = HORIZON) -> tuple[dict, dict]:
    """p and q of all sequences among the `top` most likely tokens at each place, from whole forwards."""
    target, p, q = dm.component("model", "tiny").load("cpu"), dict[tuple, float](), dict[tuple, float]()

    def grow(tokens: tuple[int, ...], of_p: float, of_q: float) -> None:
        if len(tokens) == horizon or (tokens and tokens[-1] in target.stop_ids):
            p[tokens], q[tokens] = of_p, of_q
            return
        with torch.inference_mode():
            logits = target.logits(target.hidden(torch.tensor([[*prompt.tolist(), *tokens]]))[0, -1:])[0].double()
        logits = logits.masked_fill(target.forbidden, -torch.inf)
        log_p, kept = logits.log_softmax(-1), logits.topk(top)
        of_kept = (kept.values / temperature).softmax(-1)
        for token, share in zip(kept.indices.tolist(), of_kept.tolist(), strict=True):
            if share:
                grow((*tokens, token), of_p * float(log_p[token].exp()), of_q * share)

    grow((), 1.0, 1.0)
    return p, q


@pytest.mark.slow
@pytest.mark.parametrize("chains", [400, 10_000])
def test_the_law_through_our_own_server(served, make_config, chains):
    """Whatever the server was started with, and with log q of a proposal as the server tells it."""
    target = dm.Api(url=served).load(make_config("model=tiny"), "cpu")
    prompt, hot = target.encode("Answer: "), SamplingParams(temperature=4.0)
    engine = dm.Api(url=served)
    p, q = law_of_tiny(prompt, hot.temperature)
    sampler = dm.PowerMH(alpha=1.2, proposal_temperature=hot.temperature, top_k=TOP, num_blocks=1, num_steps=1,
                         early_reject="off")
    found = drawn(ApiEngine(target, endpoint.Endpoint(engine), "raw", 16, 64), sampler, prompt, HORIZON, chains)
    assert p_value(found, moved(p, q, 1.2, 1)) > 1e-4
    assert p_value(found, q) < 1e-6


def records(config) -> dict[tuple[str, int], dict]:
    result = runs.execute(config)
    return {key_of(record): record for record in read_records(result.folder)}


@pytest.mark.slow
def test_greedy_answers_of_the_demo_are_those_of_slots(served, make_config):
    """Token by token, with log p, and with stop strings in half of them."""
    for more in ((), ("dataset.stop=['+']",)):
        demo = ("experiment=demo", "condition=greedy", "dataset.max_new_tokens=64", "dataset.limit=16", *more)
        here, there = records(make_config(*demo)), records(make_config(*demo, "engine=api", f"engine.url={served}"))
        assert len(there) == 16
        assert {key: one["tokens"] for key, one in there.items()} == {key: one["tokens"] for key, one in here.items()}
        assert {one["finish_reason"] for one in there.values()} >= ({"stop_string"} if more else {"stop_id"})
        for key, one in there.items():
            assert one["log_p"] == pytest.approx(here[key]["log_p"], abs=1e-3)
            assert one["tokens_drawn"] == one["num_tokens"]
            assert one["bits"] == "server"
            assert "bits" not in here[key]


@pytest.mark.slow
def test_the_python_api_samples(served):
    with dm.Engine("tiny", engine=dm.Api(url=served)) as engine, dm.Engine("tiny") as own:
        prompts = ["What is 7*6?", "Ann has 3 pens. Ann buys 4 more. How many pens?"]
        there, here = (each.sample(prompts, sampler="greedy", max_new_tokens=16, progress=False) for each in (engine, own))
        assert [one.tokens for one in there] == [one.tokens for one in here]
