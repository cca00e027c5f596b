"""Reports of probe runs: published rows beside rows of the same kind; and the tables of configuration and parameters."""

import dataclasses
import json
from pathlib import Path

import pytest

from dflash_mcmc.components import registered
from dflash_mcmc.draft.dflash import DFlashDraft
from dflash_mcmc.probe import meanings_of
from dflash_mcmc.report import figure, reading
from dflash_mcmc.report.build import build
from dflash_mcmc.report.parts import of_probes
from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.report.sections import configuration
from dflash_mcmc.report.study import study_of
from tests.report.folders import record, write
from tests.runs import execute

READOUT = {"probe.answers": "gold", "probe.context": "full"}
DRAFT = {"name": "dflash", **dataclasses.asdict(DFlashDraft(path="", dtype="float32"))}


@pytest.fixture(scope="module")
def make_experiment(tmp_path_factory):
    from dflash_mcmc.config import command

    def make(*overrides: str):
        of = [*overrides, "tracker=none", f"paths.outputs={tmp_path_factory.mktemp('runs')}"]
        return command.check_command(of).jobs[0].config
    return make


def test_intervals_over_few_problems_carry_the_caution_and_published_rows_their_source(tmp_path, make_experiment, monkeypatch):
    monkeypatch.setattr(figure, "save", lambda drawn, folder, name: None)
    config = make_experiment("probe=layer_rank", "model=tiny", "draft=tiny", "dataset=arith", "dataset.limit=3")
    folder = execute(config).folder
    assert json.loads((folder / "summary.json").read_text())["num_problems"] == 3
    assert "a bootstrap over 3 problems, which covers less than 95 %" in of_probes([folder])
    text = (build([folder]).folder / "report.md").read_text()
    assert "a bootstrap over 3 problems" in text
    assert "| published, section 6.1 | draft " in text
    assert "are quoted without change from" in text


@pytest.mark.parametrize(("changed", "table", "row"), [
    ({"probe.alpha": 2.0}, "aggregate", {"proposal": "draft", "temperature": 0.25, "weights": "reference"}),
    ({}, "aggregate", {"proposal": "draft", "temperature": 0.3, "weights": "reference"}),
    ({}, "aggregate", {"proposal": "draft", "temperature": 0.25, "weights": "joint"}),
    ({}, "positions", {"proposal": "draft", "temperature": 0.25, "weights": "reference", "position": "early", "from": 0,
                       "to_below": 5}),
    ({}, "positions", {"proposal": "draft", "temperature": 0.25, "weights": "reference", "position": "late", "from": 31,
                       "to_below": None}),
    ({}, "strata", {"difficulty": "easy", "temperature": 0.25, "weights": "joint"}),
])
def test_a_published_row_of_another_setting_is_not_shown(changed, table, row):
    made = {"probe.alpha": 4.0, "probe.num_samples": 100, **changed}
    row = {"run": "one", **row}
    assert reading.beside("speculative_mcmc", {"one": made}, table, [row]) == [row]


@pytest.mark.parametrize(("probe", "table", "row", "setting", "other"), [
    ("logit_blend", "hard", {"source": "layer", "layer": 33, "beta": 0.05},
     {"probe.answers": "gold", "probe.norm": "none", "probe.hard_below": 0.01}, {"probe.hard_below": 0.1}),
    ("deep_readout", "overall", {"mode": "mask"}, {"probe.answers": "gold", "probe.context": "full"},
     {"probe.context": "block"}),
    ("rejection_sampling", "samplers", {"decoder": "speculative_rejection", "fault": None, "draws": 50_000}, {},
     {"probe.laws": "draft"}),
    ("speculative_mcmc", "strata", {"difficulty": "easy", "temperature": 0.25, "weights": "reference"},
     {"probe.alpha": 4.0, "probe.num_samples": 100}, {"probe.alpha": 2.0}),
])
def test_a_published_row_needs_the_setting_of_its_quantity(probe, table, row, setting, other):
    row = {"run": "one", **row}
    shown = reading.beside(probe, {"one": setting}, table, [row])
    assert shown[1]["run"].startswith("published")
    assert reading.beside(probe, {"one": {**setting, **other}}, table, [row]) == [row]


def test_the_published_share_of_hard_tokens_is_that_of_better_ranks():
    """20.5 % is the share of tokens whose rank improves; log p improves for nearly all hard tokens."""
    setting = {"probe.answers": "gold", "probe.norm": "none", "probe.hard_below": 0.01}
    own = {"run": "one", "source": "layer", "layer": 33, "beta": 0.05}
    _, row = reading.beside("logit_blend", {"one": setting}, "hard", [own])
    assert (row["rank_wins"], row.get("wins")) == (0.205, None)


def test_every_published_number_has_a_column_of_its_table():
    for name, paper in reading._content("probes").items():
        columns = meanings_of(dict(registered("probe"))[name].cls.columns())
        for table, of in paper["tables"].items():
            for column in {key for row in of["rows"] for key in row} - {reading.RUN_COLUMN}:
                assert any(_fits(column, each) for each in columns[table]), (name, table, column)


def _fits(column: str, pattern: str) -> bool:
    start, _, end = pattern.partition("{")
    return column == pattern if not end else column.startswith(start) and column.endswith(end.partition("}")[2])


def test_a_published_row_follows_the_run_with_its_setting():
    made = {f"alpha {alpha:g}": {"probe.alpha": alpha, "probe.num_samples": 100} for alpha in (2.0, 4.0, 8.0)}
    row = {"proposal": "draft", "temperature": 0.5, "weights": "reference"}
    shown = reading.beside("speculative_mcmc", made, "aggregate", [{"run": label, **row} for label in made])
    assert [one["run"] for one in shown] == ["alpha 2", "alpha 4", "published, section 3.1", "alpha 8"]


def test_published_numbers_are_those_of_the_documents():
    """Sums and quotients that the documents state hold between the numbers of the file."""
    positions = [{"run": "one", "proposal": "draft", "temperature": 0.25, "weights": "reference", "from": first,
                  "to_below": below} for first, below in ((0, 10), (10, 30), (30, None))]
    made = {"probe.alpha": 4.0, "probe.num_samples": 100}
    found = [row for row in reading.beside("speculative_mcmc", {"one": made}, "positions", positions)
             if row["run"] != "one"]
    assert sum(row["blocks"] for row in found) == 2416
    parts = [{"run": "one", "tokens": "p_target < 0.01", "component": name}
             for name in ("random baseline", "+ features", "target")]
    shown = reading.beside("deep_readout", {"one": READOUT}, "decomposition", parts)
    ranks = [row["mean_rank"] for row in shown if row["run"] == "published, section 3.3"]
    assert [round(ranks[0] / rank, 1) for rank in ranks] == [1.0, 6.0, 42.4]


def test_a_later_publication_follows_the_document_s_row():
    own = [{"run": "one", "block": "0"}]
    shown = reading.beside("deep_readout", {"one": READOUT}, "blocks", own)
    assert [(row["run"], row.get("rank_mask")) for row in shown] == [
        ("one", None), ("published, section 3.4", 114), ("published later, 128 problems, section 3.4", 1990)]
    modes = [{"run": "one", "mode": mode} for mode in ("gold", "mask", "random")]
    shown = reading.beside("deep_readout", {"one": READOUT}, "overall", modes)
    assert [row["mean_rank_draft"] for row in shown if row["run"].startswith("published later")] == [515, 697, 6489]
    assert "retract" in reading.source_of("deep_readout")


def test_the_sampled_verify_document_has_its_rows():
    own = [{"run": "one", "decoder": name} for name in ("plain", "speculative_match", "finite_window")]
    short, agent = (reading.beside("sampled_verify", {"one": {}}, table, own) for table in ("short", "agent"))
    assert sorted(row["tokens_per_second"] for row in short if row["run"] != "one") == [16, 60, 70]
    assert [(row["decoder"], row["tool_calls"], row["n"]) for row in agent if row["run"] != "one"] == [
        ("plain", 12, 12), ("speculative_match", 12, 12), ("finite_window", 0, 12)]


def test_configuration_and_extra_parameters(tmp_path, make_experiment):
    """The draft's parameters are counted in its checkpoint, which holds neither embedding nor head."""
    for name in ("ps", "blend_ps", "draft_blend_ps"):
        run = write(tmp_path / "demo", name, [record("a")])
        if name == "draft_blend_ps":
            config = json.loads((run / "config.yaml").read_text())
            path = make_experiment("condition=draft_blend_ps").draft.path
            (run / "config.yaml").write_text(json.dumps({**config, "draft": {**DRAFT, "path": path}}))
    section = configuration.section(study_of(read(run_folders([tmp_path / "demo"]))[0]))
    differences, extra = section.tables
    assert {row["run"]: row["extra_parameters"] for row in extra.rows} == {
        "ps": 0, "blend_ps": 0, "draft_blend_ps": _parameters(Path(path))}
    run.joinpath("config.yaml").write_text(json.dumps({**config, "draft": {**DRAFT, "path": str(tmp_path / "gone")}}))
    moved = study_of(read(run_folders([tmp_path / "demo"]))[0]).runs
    assert [configuration.extra_parameters(each) for each in moved if each.label == "draft_blend_ps"] == [None]
    beta = next(row for row in differences.rows if row["setting"] == "blend")
    assert [beta[name] for name in ("ps", "blend_ps", "draft_blend_ps")] == ["none", "layer", "draft"]
    steps = next(row for row in differences.rows if row["setting"] == "sampler.num_steps")
    assert (steps["ps"], steps["Karan & Du 2025 (published)"]) == (2, 10)
    assert "sampler.alpha" not in {row["setting"] for row in differences.rows}  # equal everywhere


def _parameters(folder: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
