"""Without a probe, the run draws samples."""

from dflash_mcmc.components import groups_of
from dflash_mcmc.config.schema import unused


def test_everything_else_is_in_use(make_config):
    config = make_config("probe=none")
    assert set(groups_of(config)) == {"model", "draft", "blend", "sampler", "decoder", "dataset", "grader"}
    assert unused(config) == {"potential"}  # none is chosen
