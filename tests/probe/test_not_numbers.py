"""A pair whose logits are nan or infinite: each probe skips and counts that answer, continues, and writes no NaN as JSON."""

import json

import pytest
import torch

from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.report import figure
from tests.probes import records
from tests.runs import execute

PROBES = {
    "layer_rank": (),
    "logit_blend": ("probe.layers=[0,5]", "probe.betas=[0.1,1]"),
    "deep_readout": (),
    "speculative_mcmc": ("probe.num_samples=4", "probe.timed_rows=2"),
    "difficulty": ("sampler=greedy",),
}
GOLD = ("layer_rank", "logit_blend", "deep_readout")
"""Probes that use the dataset's solutions; the others cannot even draw an answer without valid logits."""


@pytest.fixture
def run(make_config, monkeypatch):
    """A function that returns (summary, records) of two problems: run("layer_rank")."""
    monkeypatch.setattr(figure, "save", lambda drawn, folder, name: None)

    def run(probe: str, *overrides: str) -> tuple[dict, list[dict]]:
        config = make_config(f"probe={probe}", "draft=tiny", "dataset.limit=2", *PROBES.get(probe, ()), *overrides)
        result = execute(config)
        json.dumps(result.summary, allow_nan=False)
        return result.summary, records(result.folder)

    return run


def spoilt(monkeypatch, of: type, calls: int, value: float = torch.nan) -> None:
    """Makes the logits of target or draft invalid in the first `calls` calls."""
    logits, left = of.logits, [calls]

    def sometimes(self, hidden):
        left[0] -= 1
        return torch.full_like(logits(self, hidden), value) if left[0] >= 0 else logits(self, hidden)

    monkeypatch.setattr(of, "logits", sometimes)


@pytest.mark.parametrize("overrides", [
    ("sampled_verify", "sampler=temperature", "probe.agent_tokens=60", "probe.agent_answer=4", "probe.agent_runs=1",
     "probe.long_tokens=8", "probe.temperatures=[1]", "probe.faults=[]"),
    ("layer_rank", "probe.answers=greedy"), ("logit_blend", "probe.answers=greedy"),
    ("deep_readout", "probe.answers=greedy"), *((name, *PROBES[name]) for name in ("speculative_mcmc", "difficulty"))],
    ids=lambda overrides: overrides[0])
def test_a_run_without_a_drawn_answer_has_a_summary(run, monkeypatch, overrides):
    """Its tables have no numbers, and no problem counts as measured."""
    spoilt(monkeypatch, LanguageModel, 10**9)
    summary, found = run(overrides[0], "dataset.max_new_tokens=9", *overrides[1:])
    assert summary["num_problems"] == 0
    assert summary.get("num_skipped", summary.get("num_failed", 0)) >= len({record["problem"] for record in found}) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES)
def test_the_other_problems_are_measured(run, monkeypatch, probe):
    """The first call is for the first answer, which is then skipped."""
    untimed = ["probe.timed_rows=0"] if probe == "speculative_mcmc" else []
    _, plain = run(probe, "name=plain", *untimed)
    spoilt(monkeypatch, DFlashDrafter, 1)
    summary, found = run(probe, *untimed)
    assert sorted(record.get("skipped", "") for record in found) == ["", NOT_NUMBERS]
    assert (summary["num_skipped"], summary["num_problems"]) == (1, 1)
    (own,) = [record for record in found if "skipped" not in record]
    (same,) = [record for record in plain if record["problem"] == own["problem"]]
    assert {**own, "seconds": 0} == {**same, "seconds": 0}


@pytest.mark.parametrize("probe", GOLD)
def test_a_target_without_numbers_is_skipped_and_counted(run, monkeypatch, probe):
    spoilt(monkeypatch, LanguageModel, 10**9)
    summary, found = run(probe)
    assert [record["skipped"] for record in found] == [NOT_NUMBERS] * 2
    assert summary["num_skipped"] == 2


@pytest.mark.parametrize(("weights", "autoregressive", "where"), [
    ("joint", "false", "joint_log_p"), ("reference", "true", "draw_from_target")])
def test_a_target_with_invalid_logits_after_drawn_tokens(run, monkeypatch, weights, autoregressive, where):
    """Logits after the draft's tokens, or after the target's own, are checked too."""
    from dflash_mcmc.probe.speculative_mcmc import weighing

    read, called = getattr(weighing, where), []

    def without_numbers(model, reading, *given):
        called.append(where)
        return read(model, reading._replace(hidden=reading.hidden * torch.nan), *given)

    monkeypatch.setattr(weighing, where, without_numbers)
    _, found = run("speculative_mcmc", f"probe.weights={weights}", f"probe.autoregressive={autoregressive}")
    assert called == [where] * 2
    assert [record["skipped"] for record in found] == [NOT_NUMBERS] * 2
