"""`probe=adaptation` on the embedded pair: its walk is that of the engine, and its tables are those of the records."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.api import component, sample
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.probe.adaptation import walks
from dflash_mcmc.probe.adaptation.walks import FROZEN, name_of
from dflash_mcmc.statistics.intervals import Clusters
from tests.composing import composed
from tests.probes import changed, killed, measured, records, without_times
from tests.runs import execute

RUN = ("probe=adaptation", "draft=tiny", "dataset.limit=2", "probe.rates=[0.05]", "probe.steps=[3]", "probe.blocks=4",
       "probe.every_blocks=[2]", "probe.position_edges=[16]")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run: (configuration, result)."""
    config = composed(tmp_path_factory.mktemp("outputs"), *RUN)
    return config, execute(config)


def test_the_walk_along_greedy_answers_is_that_of_the_engine(result):
    config, found = result
    questions = {problem.id: problem.question for problem in config.dataset.problems()}
    for settings in [None, *config.probe.settings()]:
        fields = {} if settings is None else {
            "adapt": settings.mode, "adapt_modules": settings.modules, "adapt_rank": settings.rank,
            "adapt_rate": settings.rate, "adapt_steps": settings.steps, "adapt_blocks": settings.blocks,
            "adapt_every_blocks": settings.every_blocks}
        drawn = sample(component("model", "tiny"), None, questions, sampler="greedy", decoder="speculative_match",
                       draft=component("draft", "tiny", **fields), progress=False)
        name = FROZEN if settings is None else name_of(settings)
        for record, answer in zip(records(found.folder), drawn, strict=True):
            entry = record["settings"][name]
            assert record["num_tokens"] == len(answer.tokens) == sum(gained for _, gained in entry["blocks"])
            assert len(entry["blocks"]) == answer.cost.blocks_drafted
            assert entry["steps"] == answer.cost.adapt_steps


def test_what_is_learned_changes_the_probabilities(result):
    learned = 0.0
    for record in records(result[1].folder):
        frozen, *others = record["settings"].values()
        assert frozen["steps"] == 0
        for each in others:
            assert len(each["log_q"]) == len(frozen["log_q"]) == len(record["log_p"])
            assert each["steps"] > 0 == each["dropped"]
            learned = max(learned, np.abs(np.subtract(each["log_q"], frozen["log_q"])).max())
        # Before its first step the draft that learns online is the checkpoint.
        online = record["settings"][name_of(result[0].probe.settings()[1])]
        np.testing.assert_allclose(online["log_q"][:7], frozen["log_q"][:7], atol=1e-5)
    assert learned > 0.01


def test_tables_equal_those_of_the_records(result):
    config, found = result
    of, rows = records(found.folder), {row["setting"]: row for row in found.summary["tables"]["settings"]}
    assert list(rows) == [FROZEN, *map(name_of, config.probe.settings())]
    for name, row in rows.items():
        entries = [record["settings"][name] for record in of]
        tau = sum(record["num_tokens"] for record in of) / sum(len(entry["blocks"]) for entry in entries)
        log_q, log_p = (np.concatenate(values) for values in (
            [entry["log_q"] for entry in entries], [record["log_p"] for record in of]))
        assert row["tau"] == pytest.approx(tau)
        assert row["tau_change"] == pytest.approx(tau - rows[FROZEN]["tau"])
        assert row["tau_ratio"] == pytest.approx(tau / rows[FROZEN]["tau"])
        assert row["mean_log_q"] == pytest.approx(log_q.mean())
        assert row["log_q_change"] == pytest.approx(log_q.mean() - rows[FROZEN]["mean_log_q"])
        assert row["beats_target"] == pytest.approx(np.mean(log_q > log_p))
        assert row["drafted"] == len(log_q)
        assert row["tau_change_low"] <= row["tau_change"] <= row["tau_change_high"]
    blocks = [row["blocks"] for row in found.summary["tables"]["positions"] if row["setting"] == FROZEN]
    assert sum(blocks) == rows[FROZEN]["blocks"]
    assert (found.folder / "fig_adaptation.png").stat().st_size > 10_000


def test_target_and_draft_may_have_different_dtypes(result, tmp_path):
    config = changed(composed(tmp_path, *RUN, "model.dtype=bfloat16", "draft.dtype=float32"), limit=1, modes=["context"])
    (found,), (exact, _) = measured(config), records(result[1].folder)
    for name, entry in found["settings"].items():
        assert sum(gained for _, gained in entry["blocks"]) == found["num_tokens"]
        assert np.abs(np.subtract(entry["log_q"][:7], exact["settings"][name]["log_q"][:7])).max() < 0.5
    assert found["log_p"] != exact["log_p"]


def test_a_draft_without_numbers_is_skipped(result, monkeypatch):
    logits = DFlashDrafter.logits
    monkeypatch.setattr(DFlashDrafter, "logits", lambda self, hidden: logits(self, hidden) * torch.nan)
    (found,) = measured(changed(result[0], limit=1, modes=["online"]))
    assert found["skipped"] == NOT_NUMBERS


def test_a_change_is_paired():
    """Both drafts gain equally on every problem, so that the change has no spread although tau has."""
    problems, tokens = Clusters(range(4)), [10, 20, 30, 40]
    ours, theirs = (tokens, [2, 4, 6, 8]), (tokens, [4, 8, 12, 16])
    found = walks.change(problems, ours, theirs)
    assert (found.value, found.low, found.high) == pytest.approx((2.5, 2.5, 2.5))
    assert walks.change(problems, ours, theirs, relative=True).value == pytest.approx(2.0)
    assert problems.ratio(*map(np.array, (tokens, [2, 9, 6, 8]))).low != problems.ratio(tokens, [2, 9, 6, 8]).high
    alone = walks.change(problems, ([0, 0, 0, 40], [0, 0, 0, 8]), ([0, 0, 0, 40], [0, 0, 0, 16]))
    assert (alone.value, alone.low, alone.high) == (2.5, None, None)


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_records(result, tmp_path):
    found = result[1]
    killed(found.folder, tmp_path)
    again = execute(composed(tmp_path / "outputs", *RUN))
    assert without_times(records(again.folder)) == without_times(records(found.folder))


@pytest.mark.slow
def test_gold_answers_and_every_list_are_settings(result):
    config = changed(result[0], limit=1, answers="gold", modules=["fc", "fc+attention"], ranks=[1, 4], rates=[0.1, 0.01])
    (record,) = measured(config)
    assert len(record["settings"]) == 1 + 2 * 2 * 2 * 2
    assert config.probe.expected_cost(config).draft_blocks > 0
