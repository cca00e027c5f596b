"""`blend=draft`: the mixture by hand and the allowed combinations.

Its block grid is tested in tests/engine/speculative/test_block_grid.py, its laws in tests/sampler.
"""

import numpy as np
import pytest

from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.errors import UserError


def test_mixture():
    mixed = DraftBlend(beta=0.25).mix(np.array([4.0, 8.0]), [np.array([0.0, 16.0])], lambda hidden: hidden)
    assert mixed.tolist() == [3.0, 10.0]
    assert DraftBlend(beta=0.25).tapped_layers(8) == ()


def test_a_speculative_decoder_is_refused(make_config):
    with pytest.raises(UserError, match=r"decoder: given 'speculative_match'; allowed: plain with blend=draft"):
        make_config("draft=tiny", "blend=draft", "decoder=speculative_match")
