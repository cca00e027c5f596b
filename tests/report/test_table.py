"""The summary table: one row per run, with the settings that vary after its name."""

import json

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.report.parts import overall
from dflash_mcmc.statistics.summaries import aggregate, summarise
from dflash_mcmc.statistics.votes import PowerVote
from tests.statistics.test_summaries import record


def folder(path, condition: str, identity: dict, **rest):
    path.mkdir()
    summary = summarise(condition, [record("a", "correct", **rest), record("b", "no_answer", **rest)])
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "run.json").write_text(json.dumps({"identity": {"version": 3, **identity}, "sessions": [{}]}))
    (path / "config.yaml").write_text("name: demo\n")
    return path


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rows(tmp_path):
    runs = [folder(tmp_path / "a", "greedy", {"sampler": "greedy"}, proposals=0, accepted=0, moved=0),
            folder(tmp_path / "b", "ps", {"sampler.alpha": 2.0, "seed": 0}),
            folder(tmp_path / "c", "ps", {"sampler.alpha": 4.0, "seed": 0})]
    header, _, *rows = overall(runs).splitlines()
    assert cells(header)[:5] == ["condition", "correct", "total", "accuracy", "95 % interval"]
    assert cells(rows[0]) == ["greedy", "1", "2", "50.0 %", "9.5 - 90.5", "10.0", "1.00", "-", "-", "1", "100"]
    assert cells(rows[1])[0] == "ps alpha=2"
    assert cells(rows[2])[0] == "ps alpha=4"
    assert cells(rows[2])[7:9] == ["50.0 %", "25.0 %"]


def test_columns_beyond_a_terminals_width_go_below(tmp_path, monkeypatch):
    run = folder(tmp_path / "a", "greedy", {"sampler": "greedy"}, proposals=0, accepted=0, moved=0)
    whole = overall([run]).splitlines()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = overall([run]).splitlines()
    heads = [cells(line) for line in lines if line.startswith("| condition")]
    assert max(map(len, lines)) <= 60 < len(whole[0])
    assert [name for head in heads for name in head if name != "condition"] == cells(whole[0])[1:]


def test_labels_have_values_as_typed(tmp_path):
    runs = [folder(tmp_path / name, "ps", {"blend.beta": beta, "decoder.fault": fault})
            for name, beta, fault in (("a", 0.0852084800119005, None), ("b", 0.5, "fault"))]
    table = overall(runs)
    assert [cells(row)[0] for row in table.splitlines()[2:]] == ["ps beta=0.0852085 fault=null", "ps beta=0.5 fault=fault"]


def test_rows_over_different_samples_have_a_note(tmp_path):
    runs = [folder(tmp_path / name, "ps", {"seed": seed}) for seed, name in enumerate("ab")]
    assert "different samples" not in overall(runs)
    (runs[0] / "summary.json").write_text(json.dumps(summarise("ps", [record("a", "correct")])))
    *_, gap, note = overall(runs).splitlines()
    assert gap == ""
    assert note.startswith("The rows cover different samples: each row uses all recorded samples of its run.")


def test_several_chains_of_few_problems_carry_the_caution(tmp_path):
    run = folder(tmp_path / "a", "temp", {})
    assert "bootstrap" not in overall([run])
    records = [record(problem, "correct" if problem > "a" else "wrong", chain) for problem in "abc" for chain in range(2)]
    (run / "summary.json").write_text(json.dumps(summarise("temp", records)))
    assert "some intervals are a bootstrap over 3 problems" in overall([run])


def test_every_vote_has_a_row_and_weights_have_a_note(tmp_path):
    run = folder(tmp_path / "a", "temp", {})
    records = [record("a", verdict, chain, answer=answer, log_p=log_p, log_q=log_p, proposals=0, accepted=0, moved=0)
               for chain, (verdict, answer, log_p) in enumerate([("correct", "1", -1.0), *[("wrong", "2", -9.0)] * 2])]
    summary = summarise("temp", records)
    for by in ("majority", PowerVote(alpha=4.0)):
        summary |= aggregate("temp", records, by, 3)
    (run / "summary.json").write_text(json.dumps(summary))
    _, _, *rows, gap, note = overall([run]).splitlines()
    assert [cells(row)[:4] for row in rows] == [
        ["temp", "1", "3", "33.3 %"], ["temp, majority of 3", "0", "1", "0.0 %"],
        ["temp, power vote (alpha 4) of 3", "1", "1", "100.0 %"]]
    assert (gap, note) == ("", "temp, power vote (alpha 4) of 3: 1.0 effective chains (mean); one chain has most of the "
                           "weight on 100 % of the problems.")


def test_accepted_length_is_shown_if_a_run_drafted(tmp_path):
    drafted = {"tokens_drawn": 14, "blocks_drafted": 4, "tokens_drafted": 28, "tokens_kept": 10}
    runs = [folder(tmp_path / "a", "greedy", {"decoder": "plain"}),
            folder(tmp_path / "b", "greedy", {"decoder": "speculative_match"}, **drafted)]
    header, _, *rows = overall(runs).splitlines()
    assert cells(header)[-1] == "accepted length"
    assert [cells(row)[-1] for row in rows] == ["-", "3.50"]
    assert "accepted length" not in overall(runs[:1])


def test_a_folder_without_a_run_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"summary\.json: cannot be read"):
        overall([tmp_path])
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match="cannot be parsed"):
        overall([tmp_path])


def test_the_numbers_of_a_sampler_and_the_parts_of_the_time_follow_the_table(tmp_path):
    failed = summarise("ps", [record(problem, "not_drawn", proposals=0) for problem in "ab"])
    runs = [folder(tmp_path / name, "smc", {"seed": number}) for number, name in enumerate("abc")]
    whole = {"measures/log_z": -3.25, "measures/resamplings": 4.0,
             "mean_prefill_seconds": 0.0123, "mean_draw_seconds": 12.5, "mean_grade_seconds": 1e-4}
    added = (whole, {"mean_grade_seconds": 0.5}, {**failed, "condition": "smc"})
    for run, more in zip(runs, added, strict=True):
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | more))
    *_, row, _, measured, _, spent, other = overall(runs).splitlines()
    assert cells(row) == ["smc seed=2", "0", "2", "0.0 %", "0.0 - 65.8", "-", "-", "-", "-", "2", "100"]
    assert measured == "smc seed=0: log_z -3.25, resamplings 4 (means)"
    assert [spent, other] == ["smc seed=0: seconds a sample: prefill 0.0123, draw 12.5, grade < 0.001.",
                                               "smc seed=1: seconds a sample: grade 0.5 (prefill and draw not measured)."]
