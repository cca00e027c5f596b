"""The chains equal those of a run without the probe, a cell depends on its sampler alone, and tables count the traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching.interface import Finished
from dflash_mcmc.probe import Work
from dflash_mcmc.probe.mixing.chains import compact
from dflash_mcmc.report import figure
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import read_records
from dflash_mcmc.types import Cost
from tests.composing import composed
from tests.runs import execute

SMALL = ("dataset.limit=2", "num_chains=2", "dataset.max_new_tokens=32", "sampler.num_blocks=2", "sampler.num_steps=4",
         "tracker=none")
TABLES = ["cells", "convergence", "effective_samples", "autocorrelation", "by_cut", "by_length", "log_ratios", "moves", "cost"]
FIGURES = {f"fig_mixing_{name}" for name in ("acceptance", "traces", "autocorrelation", "log_ratio")}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """The typed configuration of overrides, with its own output folder."""
    def make(*overrides: str) -> Config:
        return composed(tmp_path_factory.mktemp("outputs"), *SMALL, *overrides)

    return make


@pytest.fixture
def figures(monkeypatch):
    """Names of the figures made; they are not written, which would take most of the time."""
    names = []
    monkeypatch.setattr(figure, "save", lambda drawn, folder, name: names.append(name))
    return names


@pytest.fixture(scope="module")
def grid(make):
    """Four settings, two of which are equivalent."""
    return execute(make("probe=mixing", "probe.alphas=[1.0,4.0]", "probe.temperatures=[null,1.0]"))


def records(folder) -> list[dict]:
    return read_records(folder)


def by_unit(found: list[dict]) -> dict:
    return {(record["problem"], record["chain"]): record["cells"] for record in found}


def measured(config) -> dict:
    """The cells of all units, measured without a run."""
    work = Work(config.probe.units(config), "cpu")
    return {tuple(unit): record["cells"] for unit, record in config.probe.measure(config, work)}


def settings_of(cells: list[dict]) -> list[tuple]:
    return [(cell["alpha"], cell["temperature"], cell["early_reject"]) for cell in cells]


def test_the_chains_equal_those_of_a_run_without_a_probe(make, grid):
    drawn = records(execute(make("sampler.alpha=4")).folder)
    cells = by_unit(records(grid.folder))
    assert len(drawn) == len(cells) == 4
    for sample in drawn:
        cell = cells[sample["problem"], sample["chain"]][1]
        assert settings_of([cell]) == [(4.0, 0.25, "exact")]
        assert cell["trace"] == compact(sample["trace"])
        assert {name: cell[name] for name in ("num_tokens", "moved", "token_forwards", "tokens_skipped")} == {
            name: sample[name] for name in ("num_tokens", "moved", "token_forwards", "tokens_skipped")}


def test_a_cell_depends_on_its_sampler_alone(make, grid):
    cells = by_unit(records(grid.folder))
    assert all(settings_of(found) == [(1.0, 1.0, "exact"), (4.0, 0.25, "exact"), (4.0, 1.0, "exact")]
               for found in cells.values())
    for place, values in enumerate((("sampler.alpha=1",), ("sampler.alpha=4",), ("sampler.proposal_temperature=1",))):
        alone = measured(make("probe=mixing", *values))
        assert alone == {unit: [found[place]] for unit, found in cells.items()}
    assert len({json.dumps(found) for found in cells[records(grid.folder)[0]["problem"], 0]}) == 3


def test_rates_equal_counts_of_the_traces(grid):
    for place, row in enumerate(grid.summary["tables"]["cells"]):
        letters = "".join(record["cells"][place]["trace"]["decision"] for record in records(grid.folder))
        assert row["proposals"] == len(letters) == 2 * 2 * 2 * 4
        for name, counted in (("acceptance", "ai"), ("moved_rate", "a"), ("identical", "i"), ("abandoned", "x")):
            assert row[name] == pytest.approx(sum(letters.count(letter) for letter in counted) / len(letters))
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert grid.summary["num_cells"] == 3
    assert grid.summary["alpha=4/temperature=0.25/exact/moved_rate"] == grid.summary["tables"]["cells"][1]["moved_rate"]


def test_the_folder_has_tables_and_figures(grid):
    assert list(grid.summary["tables"]) == TABLES
    names = {path.name for path in grid.folder.iterdir()}
    assert {f"{name}.csv" for name in (*TABLES, "autocorrelation_by_lag", "log_ratio_counts")} <= names
    for ending in ("png", "svg"):
        assert {path.stem for path in grid.folder.glob(f"*.{ending}")} == {*FIGURES, "fig_mixing_grid"}


def test_one_chain_in_one_cell(make, figures):
    alone = execute(make("probe=mixing", "num_chains=1", "dataset.limit=1"))
    assert set(figures) == FIGURES
    row = next(row for row in alone.summary["tables"]["convergence"] if row["window"] == "all")
    assert (row["rhat"], row["rhat_problems"], row["problems"]) == (None, 0, 1)
    assert "moved_rate" in alone.summary


def test_early_rejection_is_paired(make, figures, grid):
    found = execute(make("probe=mixing", "sampler.proposal_temperature=1", "probe.early_rejects=[auto,off]"))
    (row,) = found.summary["tables"]["early_rejection"]
    spent = [[record["cells"][place]["tokens_drawn"] for record in records(found.folder)] for place in (0, 1)]
    assert row["tokens_drawn"] == pytest.approx(sum(spent[0]) / sum(spent[1]))
    assert row["tokens_drawn"] < 1.0
    assert (row["same"], row["chains"]) == (1.0, 4)
    assert [row["abandoned"] > 0 for row in found.summary["tables"]["cells"]] == [True, False]


def test_auto_is_resolved_in_each_cell(make):
    config = make("probe=mixing", "probe.temperatures=[2.0,0.5]", "probe.alphas=[4.0]", "sampler.alpha=0.5")
    assert config.sampler.early_reject == "off"
    assert [setting.effective() for setting in config.probe.measured(config)] == [(4.0, 2.0, "off"), (4.0, 0.5, "exact")]


def test_the_draft_as_proposal(make):
    config = make("probe=mixing", "sampler=draft_mh", "draft=tiny", "probe.temperatures=[0.5,1.0]", "dataset.limit=1")
    cells = measured(config)
    assert all(settings_of(found) == [(4.0, 0.5, "off"), (4.0, 1.0, "off")] for found in cells.values())
    assert all(found[0]["trace"] != found[1]["trace"] for found in cells.values())


def test_an_interrupted_run_has_the_same_records(make, grid, figures, monkeypatch):
    config, append, kept = make("probe=mixing", "probe.alphas=[1.0,4.0]", "probe.temperatures=[null,1.0]"), RunStore.append, []

    def stop(store, record):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(record)
        append(store, record)

    monkeypatch.setattr(RunStore, "append", stop)
    with pytest.raises(KeyboardInterrupt):
        execute(config)
    monkeypatch.setattr(RunStore, "append", append)
    continued = execute(config)
    assert continued.num_new == 2
    assert by_unit(records(continued.folder)) == by_unit(records(grid.folder))
    assert continued.summary["tables"] == grid.summary["tables"]


class Failing:
    """An engine that fails to draw the chains of the given problems."""

    def __init__(self, engine, problems):
        self.engine, self.problems = engine, problems

    def close(self):
        self.engine.close()

    def run(self, chains):
        chains = list(chains)
        yield from self.engine.run(entry for entry in chains if entry[0][0].problem not in self.problems)
        for tag, _ in chains:
            if tag[0].problem in self.problems:
                yield Finished(tag, None, Cost(tokens_drawn=3), 0.0, 0.0, "no numbers")


@pytest.mark.parametrize("number", [1, 2])
def test_chains_that_could_not_be_drawn_are_recorded_and_counted(make, figures, monkeypatch, number):
    config, engine = make("probe=mixing", "probe.alphas=[2.0,4.0]"), slots.Slots.start
    failing = [problem.id for problem in config.dataset.problems()][:number]
    monkeypatch.setattr(slots.Slots, "start", lambda *arguments: Failing(engine(*arguments), failing))
    found = execute(config)
    assert found.summary["num_failed"] == 2 * 2 * number
    assert set(figures) == {*FIGURES, "fig_mixing_grid"}
    assert [row["failed"] for row in found.summary["tables"]["cells"]] == [2 * number] * 2
    assert [row["problems"] for row in found.summary["tables"]["cells"]] == [2 - number] * 2
    record = next(record for record in records(found.folder) if record["problem"] == failing[0])
    assert record["cells"][0] == {"alpha": 2.0, "temperature": 0.5, "early_reject": "exact", "failure": "no numbers",
                                  "tokens_drawn": 3, "tokens_skipped": 0, "token_forwards": 0, "target_forwards": 0}


def test_the_identity(make):
    config = make("probe=mixing")
    found = identity_of(config)
    assert found["probe.early_rejects"] == ["exact"]
    assert not any(name.startswith("grader") for name in found)
    assert identity_of(replace(config, num_chains=5)) == found
    off = make("probe=mixing", "sampler.early_reject=off")
    assert identity_of(off) == {**found, "probe.early_rejects": ["off"]}  # it draws a different number of tokens
    assert identity_of(make("probe=mixing", "probe.alphas=[4.0]")) != found
    assert identity_of(make("probe=mixing", "probe.temperatures=[0.25,null]")) != found


def test_common_random_numbers(grid):
    """In all cells, a chain cuts at the same share of the sequence as long as its length is the same."""
    for record in records(grid.folder):
        traces = [cell["trace"] for cell in record["cells"]]
        alike = [place for place in range(8) if len({trace["length"][place] for trace in traces}) == 1]
        assert alike
        for place in alike:
            assert len({trace["cut"][place] for trace in traces}) == 1
