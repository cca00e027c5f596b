"""Plain decoding: nothing is drafted."""

from dflash_mcmc.decoder.plain import Plain


def test_plain_drafts_nothing():
    assert Plain().speculation(None) is None
