"""Runs through this package's own server: the law, the demo beside engine=slots, potentials, votes, and kills."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dflash_mcmc as dm
from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.engine.api.session import ApiEngine
from dflash_mcmc.ops import SamplingParams
from tests.engine.api.test_law import drawn, moved, p_value
from tests.serving import Served

TOP, HORIZON = 3, 3


@pytest.fixture(scope="module")
def served():
    """A server that is started with another sampler and blend-free, as `python -m dflash_mcmc.serve condition=ps` is."""
    with Served(["model=tiny", "condition=ps", "serve.port=0", "dataset.max_new_tokens=96", "serve.max_waiting=4096",
                 "hardware.num_slots=16"]) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


def law_of_tiny(prompt: np.ndarray, temperature: float) -> tuple[dict, dict]:
    """p and q of all sequences among the `TOP` most likely tokens at each place, from whole forwards."""
    target, p, q = dm.component("model", "tiny").load("cpu"), dict[tuple, float](), dict[tuple, float]()

    def grow(tokens: tuple[int, ...], of_p: float, of_q: float) -> None:
        if len(tokens) == HORIZON or (tokens and tokens[-1] in target.stop_ids):
            p[tokens], q[tokens] = of_p, of_q
            return
        with torch.inference_mode():
            logits = target.logits(target.hidden(torch.tensor([[*prompt.tolist(), *tokens]]))[0, -1:])[0].double()
        logits = logits.masked_fill(target.forbidden, -torch.inf)
        log_p, kept = logits.log_softmax(-1), logits.topk(TOP)
        of_kept = (kept.values / temperature).softmax(-1)
        for token, share in zip(kept.indices.tolist(), of_kept.tolist(), strict=True):
            grow((*tokens, token), of_p * float(log_p[token].exp()), of_q * share)

    grow((), 1.0, 1.0)
    return p, q


@pytest.mark.parametrize("chains", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_law_through_our_own_server(served, make_config, chains):
    """Whatever the server was started with, and with log q of a proposal as the server tells it."""
    target = dm.Api(url=served).load(make_config("model=tiny"), "cpu")
    prompt, hot = target.encode("Answer: "), SamplingParams(temperature=4.0)
    engine = dm.Api(url=served)
    p, q = law_of_tiny(prompt, hot.temperature)
    sampler = dm.PowerMH(alpha=2.0, proposal_temperature=hot.temperature, top_k=TOP, num_blocks=1, num_steps=1,
                         early_reject="off")
    found = drawn(ApiEngine(target, endpoint.Endpoint(engine), "raw", 16, 64), sampler, prompt, HORIZON, chains)
    assert p_value(found, moved(p, q, 2.0, 1)) > 1e-4
    assert p_value(found, q) < 1e-6
