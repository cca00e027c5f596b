"""A problem that does not fit into the model's positions is recorded as too long, and the run goes on."""

import json

import numpy as np
import pytest

import dflash_mcmc
from dflash_mcmc.errors import UserError
from dflash_mcmc.report.parts import overall
from dflash_mcmc.runner import plan
from dflash_mcmc.runner.fitting import fit
from dflash_mcmc.runner.plan import checked
from dflash_mcmc.store.records import read_records
from tests.runs import execute

QUICK = ("condition=ps", "sampler.num_blocks=2", "sampler.num_steps=1", "dataset.max_new_tokens=24", "dataset=jsonl",
         "num_chains=2")


@pytest.fixture
def problems(tmp_path) -> str:
    """Three problems, of which the second is longer than the 1,024 positions of the embedded model."""
    file = tmp_path / "problems.jsonl"
    texts = {"a": "What is 3 + 4?", "long": "3 + 4 + " * 300, "b": "What is 9 - 2?"}
    file.write_text("".join(json.dumps({"id": name, "question": text, "answer": "7", "solution": "#### 7"}) + "\n"
                            for name, text in texts.items()))
    return f"dataset.path={file}"


def without_times(records) -> list[dict]:
    return [{name: value for name, value in record.items() if not name.endswith("seconds")}
            for record in sorted(records, key=lambda record: (record["problem"], record["chain"]))]


def test_the_run_goes_on_and_the_length_is_in_the_record(make_config, problems, capsys):
    result = execute(make_config(*QUICK, problems, "dataset.id_field=id"))
    records = without_times(read_records(result.folder))
    long = [record for record in records if record["problem"] == "long"]
    assert [(record["verdict"], record["num_tokens"], record["token_forwards"]) for record in long] == [("too_long", 0, 0)] * 2
    count = long[0]["prompt_tokens"]
    assert count > 1024
    assert long[0]["reason"] == (f"the prompt has {count:,} tokens, and with an answer of up to 24 tokens it exceeds the "
                                 "model's 1,024 positions")
    assert all("prompt_tokens" not in record and record["verdict"] != "too_long" for record in records if record not in long)
    assert "2 of 6 samples are too long for the model and count as not correct: long: the prompt" in capsys.readouterr().err
    assert (result.summary["too_long"], result.summary["not_drawn"], result.summary["num_samples"]) == (2, 0, 6)
    assert result.summary["accuracy"] <= 4 / 6
    assert {record["finish_reason"] for record in long} == {"too_long"}
    header, _, row, *_ = overall([result.folder]).splitlines()
    assert header.split("|")[-2].strip() == "too long"
    assert row.split("|")[-2].strip() == "2"
    table = dflash_mcmc.read(result.folder)
    assert table[["log_p", "num_tokens"]].isna().all(axis=1).tolist() == (table["verdict"] == "too_long").tolist()
    assert table["log_p"].mean() == pytest.approx(result.summary["mean_log_p"])
    # The others are as they would be alone, and a run that is started again has nothing to do.
    alone = execute(make_config(*QUICK, problems, "dataset.id_field=id", "dataset.ids=[a,b]", "seed=0", "name=alone"))
    assert without_times(read_records(alone.folder)) == [record for record in records if record not in long]
    assert "too long" not in overall([alone.folder])
    assert execute(make_config(*QUICK, problems, "dataset.id_field=id")).num_new == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", [QUICK, ("probe=layer_rank", "dataset=jsonl", "dataset.solution_field=solution")],
                         ids=["samples", "probe"])
def test_a_dry_run_counts_the_cost_of_the_problems_that_fit(problems, method):
    """Its table is that of the problems that fit alone, whose estimates are all the same."""
    def rows(*ids: str) -> list[str]:
        shown = plan.table(checked([*method, problems, "dataset.id_field=id", "tracker=none", "dry_run=true", *ids]))
        return shown.split("\n\n")[0].splitlines()

    assert rows() == rows("dataset.ids=[a,b]") != rows("dataset.ids=[a]")


def test_a_run_continues_where_only_long_problems_are_left(make_config, problems):
    first = execute(make_config(*QUICK, problems, "dataset.id_field=id", "dataset.limit=1"))
    more = execute(make_config(*QUICK, problems, "dataset.id_field=id", "dataset.limit=2"))
    assert (first.num_new, more.num_new) == (2, 2)
    assert more.summary["too_long"] == 2


def test_a_run_of_long_problems_alone_is_refused(make_config, problems):
    with pytest.raises(UserError, match=r"dataset: no problem fits into the model: the shortest problem, long, takes \d+ of"):
        execute(make_config(*QUICK, problems, "dataset.id_field=id", "dataset.ids=[long]"))


@pytest.mark.slow
def test_units_of_a_probe_that_are_too_long_are_counted_as_failed(make_config, problems):
    given = ("probe=layer_rank", "dataset=jsonl", "dataset.id_field=id", problems, "dataset.solution_field=solution")
    result = execute(make_config(*given))
    assert result.summary["num_units_failed"] == 1
    failures = [record["failure"] for record in read_records(result.folder) if "failure" in record]
    assert failures[0].startswith("too_long: the prompt has ")


@pytest.mark.parametrize(("tokens", "positions", "fits"), [(8, 11, True), (9, 11, False), (9, None, True)])
def test_prompt_and_answer_have_to_fit_together(make_config, tokens, positions, fits, monkeypatch):
    from dflash_mcmc.chains import build
    from dflash_mcmc.tokenizer import PromptEncoder

    monkeypatch.setattr(build, "encoded", lambda *_: {"a": np.zeros(tokens, np.int64)})
    config = make_config("condition=greedy", "dataset.max_new_tokens=3", "dataset.limit=1")
    problem = config.dataset.problems()[0]._replace(id="a")
    found = fit(config, PromptEncoder(None, positions), [problem])
    assert (list(found.prompts), list(found.too_long)) == ((["a"], []) if fits else ([], ["a"]))
