"""`blend=none` changes nothing and taps nothing."""

import numpy as np

from dflash_mcmc.blend.none import NoBlend


def test_returns_the_last_hidden_state():
    last = np.array([1.0, -2.0])
    assert NoBlend().mix(last, [], lambda hidden: hidden * 0) is last
    assert NoBlend().tapped_layers(36) == ()
