"""`probe=deep_readout` on the embedded pair: its records, its options, and invalid input."""

import json

import numpy as np
import pytest

from dflash_mcmc.probe import Work
from dflash_mcmc.probe.deep_readout import MODES, TARGET, DeepReadout
from dflash_mcmc.probe.deep_readout.readout import hidden_states, read_out
from dflash_mcmc.rng import Key
from dflash_mcmc.store.records import read_records
from tests.runs import execute

READERS = (TARGET, *MODES)

PROBE = ("probe=deep_readout", "draft=tiny")
BLOCK = 8


def measured(config) -> dict[str, dict]:
    """The record of each problem, measured without a run."""
    work = Work(config.probe.units(config), "cpu")
    return {unit.problem: record for unit, record in config.probe.measure(config, work)}


@pytest.fixture
def found(make_config):
    """Records with overrides on four problems of the embedded dataset: found("probe.context=block")."""
    return lambda *overrides: measured(make_config(*PROBE, "dataset.limit=4", *overrides))


@pytest.mark.slow
def test_a_run_leaves_records_tables_and_figures(make_config):
    config = make_config(*PROBE, "dataset.limit=8")
    result = execute(config)
    records = read_records(result.folder)
    assert len(records) == result.summary["num_problems"] + result.summary["num_skipped"] == 8
    model = config.model.load("cpu")
    for problem, record in zip(config.dataset.problems(), records, strict=True):
        whole = len(model.encode(problem.solution)) // BLOCK
        assert record["block"] == [number for number in range(whole) for _ in range(BLOCK - 1)]
        assert {len(values) for part in ("p", "rank") for values in record[part].values()} == {len(record["block"])}
        assert set(record["p"]) == set(record["rank"]) == set(READERS)
    tables = result.summary["tables"]
    assert list(tables) == ["overall", "confidence", "decomposition", "blocks", "parameters"]
    assert [row["n"] for row in tables["overall"]] == [sum(len(record["block"]) for record in records)] * 3
    assert sum(row["n"] for row in tables["blocks"]) == tables["overall"][0]["n"]
    mean = [sum(sum(record["p"][name]) for record in records) / tables["overall"][0]["n"] for name in ("target", "mask")]
    assert [tables["overall"][0][f"mean_p_{end}"] for end in ("target", "draft")] == pytest.approx(mean)
    names = {path.name for path in result.folder.iterdir()}
    for figure in ("architecture", "bucket_rank_comparison", "signal_decomposition", "block_rank_decay", "extended_context"):
        assert (result.folder / f"fig_{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert f"fig_{figure}.svg" in names
    assert {"block_curves.csv", "position_curves.csv", *(f"{name}.csv" for name in tables)} <= names
    assert execute(config).num_new == 0


def test_a_record_depends_on_its_problem_alone(make_config):
    config = make_config(*PROBE, "dataset.limit=4")
    model = config.model.load("cpu")
    drafter, records = config.draft.load(model), measured(config)
    problem = config.dataset.problems()[3]
    prompt = model.encode(config.model.prompt(model.tokenizer, problem.question))
    answer = model.encode(problem.solution)
    key = Key(0).fold_in("deep_readout", problem.id, "noise")
    alone = read_out(drafter, hidden_states(drafter, prompt, answer, "full", key, MODES), MODES)
    assert {part: records[problem.id][part] for part in ("p", "rank")} == alone
    counts = records[problem.id]["parameters"]
    assert counts["draft_fc"] == drafter.network.fc.weight.numel()
    assert counts["words"] == len(model.tokenizer)


def test_each_option_has_its_effect(found):
    base, starved = found(), found("probe.context=block")
    for other in (starved, found("probe.context=prompt")):
        for name, record in base.items():
            first = record["block"].count(0)
            for mode in MODES:
                assert other[name]["p"][mode][:first] == pytest.approx(record["p"][mode][:first], rel=1e-3)
            if len(record["block"]) > first:
                assert other[name]["p"]["mask"][first:] != pytest.approx(record["p"]["mask"][first:], rel=1e-3)
            assert other[name]["p"]["target"] == record["p"]["target"]
    injected = found("probe.context=block", "probe.reinject_every=2")
    assert max(max(record["block"]) for record in injected.values()) >= 2
    for name, record in injected.items():
        again = (np.array(record["block"]) > 0) & (np.array(record["block"]) % 2 == 0)
        masks, reinjected = (np.array(record["p"][mode]) for mode in ("mask", "reinject"))
        assert masks == pytest.approx(starved[name]["p"]["mask"], rel=1e-3)
        assert reinjected[~again] == pytest.approx(masks[~again], rel=1e-3)
        if again.any():
            assert reinjected[again] != pytest.approx(masks[again], rel=1e-3)
    reseeded = found("seed=1")
    for name, record in base.items():
        assert {mode for mode in READERS if reseeded[name]["p"][mode] != record["p"][mode]} == {"random"}
    short = found("draft.block_size=5")
    assert {record["block_size"] for record in short.values()} == {5}
    assert all(max(short[name]["block"]) > max(record["block"]) for name, record in base.items())


@pytest.fixture
def solved(make_config, tmp_path):
    """A configuration for problems with these solutions."""
    def make(*solutions: str):
        rows = [{"problem": "Ann has 3 pens.", "answer": "3", "level": 1, "subject": "s", "unique_id": f"p{number}",
                 "solution": solution} for number, solution in enumerate(solutions)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_config(*PROBE, "dataset=math500", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false")

    return make


def test_empty_and_short_answers_are_skipped_and_counted(solved, monkeypatch):
    monkeypatch.setattr(DeepReadout, "figures", lambda *arguments: {})
    config = solved("", "3+4=7.", "First 30+41=71. Then 71-11=60. The answer is 60.")
    result = execute(config)
    records = read_records(result.folder)
    assert [record.get("skipped") for record in records] == ["empty", f"shorter than {BLOCK} tokens", None]
    assert (result.summary["num_problems"], result.summary["num_skipped"]) == (1, 2)
    assert result.summary["tables"]["overall"][0]["n"] == len(records[2]["block"]) > 0
