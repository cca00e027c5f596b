"""Every condition of `conf/condition`: a start that dies within a run loses nothing and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_mcmc.store.folder import RunStore
from tests.conftest import ROOT
from tests.runner.test_samples import records_of, same
from tests.runs import execute

SHORT = ("dataset.limit=3", "num_chains=2", "dataset.max_new_tokens=16", "hardware.num_slots=4")
NUM_SAMPLES = 6
CONDITIONS = sorted(path.stem for path in (ROOT / "conf/condition").glob("*.yaml"))
QUICK = ("csmc", "isir")  # the rest is slow


class Died(BaseException):
    """The end of a process, which nothing in it can catch as an error."""


@pytest.mark.parametrize("condition", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
                                       for name in CONDITIONS])
def test_a_start_that_dies_changes_nothing(make_config, tmp_path, monkeypatch, condition):
    whole = execute(make_config(f"condition={condition}", *_fitting(condition), f"paths.outputs={tmp_path / 'whole'}"))
    config = make_config(f"condition={condition}", *_fitting(condition), f"paths.outputs={tmp_path / 'in_parts'}")
    for alive in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(RunStore, "append", _dying_after(alive))
            with pytest.raises(Died):
                execute(config)
    last = execute(config)
    assert last.num_new == NUM_SAMPLES - 3
    same(records_of(last.folder), records_of(whole.folder))


def _dying_after(count: int):
    """`RunStore.append` that records `count` samples and dies within the next one."""
    append, left = RunStore.append, [count]

    def dying(self: RunStore, record) -> None:
        if not left[0]:
            raise Died
        left[0] -= 1
        append(self, record)

    return dying


def _fitting(condition: str) -> tuple[str, ...]:
    """A short setting of a condition: two stages, or two steps of a wrapper."""
    text = Path(ROOT / "conf/condition" / f"{condition}.yaml").read_text()
    staged = any(f"sampler: {name}" in text for name in ("power_mh", "multiple_try", "replica_exchange"))
    wrapped = ("sampler.num_steps=2",) if "wrapper:" in text else ()
    draft = ("draft=tiny",) if condition.startswith("draft") else ()
    one = ("num_chains=1", "dataset.limit=6") if condition in ("greedy", "blend_greedy") else ()
    return (*SHORT, *(("sampler.num_blocks=2",) if staged else ()), *wrapped, *draft, *one)
