"""`sampler=greedy`: its law is a point mass on the sequence of most likely tokens."""

import numpy as np
import pytest

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.sampler.greedy import Greedy
from dflash_mcmc.testing import PROMPT, law_of
from dflash_mcmc.types import Trajectory

HORIZON = 5


@pytest.mark.parametrize("blend", [NoBlend(), LayerBlend(beta=0.6, layer=0, norm="final")], ids=["none", "layer"])
@pytest.mark.parametrize("seed", range(5))
def test_law_is_a_point_mass_on_the_argmax(blend, seed):
    engine = TabularEngine(TabularModel(4, (0,), seed=seed), blend)
    law = law_of(lambda key: engine.run(Greedy(alpha=2.0).chain(PROMPT, HORIZON, key)).trajectory)
    expected = []
    while len(expected) < HORIZON and expected[-1:] != [0]:
        path = Trajectory.start(PROMPT)._replace(tokens=np.array(expected, dtype=np.int64))
        expected.append(int(np.argmax(engine.log_p(path))))
    assert law == {tuple(expected): 1.0}
