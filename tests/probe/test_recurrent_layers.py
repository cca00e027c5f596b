"""Every probe measures a target with recurrent layers, or refuses it in a line before the weights are loaded."""

import dataclasses

import pytest
import torch

from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import UserError
from dflash_mcmc.runner import plan
from tests.checkpoints import hybrid_pair
from tests.composing import composed
from tests.probes import measured

SMALL = ("dataset.limit=1", "dataset.max_new_tokens=10", "num_chains=1")
PROBES = {
    "speculative_mcmc": ("probe.weights=reference", "probe.autoregressive=false", "probe.num_samples=3", "probe.timed_rows=2"),
    "deep_readout": ("probe.answers=greedy",), "layer_rank": (), "logit_blend": ("probe.layers=[2]", "probe.betas=[0.1]"),
    "difficulty": ("sampler=greedy",),
}


@pytest.fixture(autouse=True)
def own_random_state():
    """Transformers draws random numbers while it loads these models."""
    with torch.random.fork_rng():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hybrid_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_measures_it(tmp_path, pair, name):
    config = composed(tmp_path, *pair, f"probe={name}", *SMALL, *PROBES[name])
    plan.check([Job(config, (), {})])
    found = measured(config)
    assert len(found) == len(config.probe.units(config)) > 0
    assert not any({"skipped", "failure"} & record.keys() for record in found)


@pytest.mark.parametrize("changes", [{"autoregressive": False}, {"weights": "reference"}])
def test_continuations_that_are_read_together_are_refused_before_the_start(tmp_path, pair, monkeypatch, changes):
    config = composed(tmp_path, *pair, "probe=speculative_mcmc", *SMALL)
    config = dataclasses.replace(config, probe=dataclasses.replace(config.probe, **changes))
    with pytest.raises(UserError, match=r"^probe: given one that reads many continuations .* states a mask cannot share"):
        plan.check([Job(config, (), {})])
