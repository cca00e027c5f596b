"""`draft=none` loads nothing."""

from dflash_mcmc.draft.none import NoDraft


def test_nothing_is_loaded():
    assert NoDraft().load(None) is None
