"""The engine of slots is the default, and changes no identity."""

import pytest

from dflash_mcmc.config.identity import identity_of, run_folder
from dflash_mcmc.engine.batching.batched import BatchedEngine


def test_the_default_engine_is_no_part_of_identity_label_and_folder(make_config):
    config = make_config("sampler=greedy")
    assert not [key for key in identity_of(config) if key.startswith("engine")]
    assert config.label() == "greedy"
    assert "slots" not in str(run_folder(config, "0"))


@pytest.mark.parametrize("choice", [(), ("engine=slots",)])
def test_starts_the_batched_engine(make_config, choice):
    config = make_config("sampler=greedy", "hardware.num_slots=2", *choice)
    target = config.engine.load(config, "cpu")
    engine = config.engine.start(config, target, 20, 3)
    assert isinstance(engine, BatchedEngine)
    assert (engine.model, engine.num_slots) == (target, 2)
