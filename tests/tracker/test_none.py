"""`tracker=none` accepts every call and does nothing."""

from dflash_mcmc.tracker.none import NoTracker


def test_accepts_every_call():
    run = NoTracker().start(None)
    run.log({"a": 1}, 1)
    run.summary({}, [])
    run.publish(None, {}, [])
    run.finish(0)
