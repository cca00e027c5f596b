"""`budget`: mistakes in one line, and settings that spend it, on the embedded model."""

from __future__ import annotations

import json
import re

import pytest

from dflash_mcmc.__main__ import main
from dflash_mcmc.config import command as cli
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.registry import components, name_of
from dflash_mcmc.runner import budget, loop
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.statistics.outcomes import TOLERANCE
from dflash_mcmc.store.reading import read_records
from tests.refusals import refused

SHORT = ("dataset.limit=2", "dataset.max_new_tokens=64", "tracker=none", "hardware.num_threads=1", "assumed.prompt_length=57")
METHODS = ("greedy", "temp", "ps")
BUDGETS = (300.0, 700.0)
TINY = ("sweep=equal_cost", f"condition={','.join(METHODS)}", "budget=300,700", "pilot_problems=2", "sampler.num_blocks=4",
        *SHORT)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.prepare()


MISTAKES = {
    "negative": (["budget=-1"], "budget: given -1.0; allowed: a number > 0 or null"),
    "no number": (["budget=much"], "budget"),
    "unit": (["budget=900", "budget_unit=tokens"], "budget_unit: given 'tokens'; allowed: one of 'token_forwards', 'seconds'"),
    "too small": (["budget=100"], "budget: given 100.0; allowed: at least 415.6 with ps, the estimated cost of "
                                  "sampler.num_steps=1 (assumed.* sets the lengths)"),
    "no rate": (["budget=9", "budget_unit=seconds"], "hardware.tokens_per_second: given None; allowed: a number with"),
    "no sampler": (["condition=greedy", "budget=900"], "budget: given 900.0; allowed: null with sampler=greedy"),
    "probe": (["probe=mixing", "budget=900"], "budget: given 900.0; allowed: null with probe=mixing"),
    "setting": (["budget=9000", "sampler.num_steps=3"], "sampler.num_steps: given '3'; allowed: no value with budget=9000"),
    "chains": (["condition=temp", "budget=9000", "num_chains=3"], "num_chains: given '3'; allowed: no value with budget=9000"),
    "vote of chains": (["budget=9000", "num_chains=3", "aggregate=majority"], "aggregate: given 'majority'; allowed: null"),
    "search": (["sweep=optuna", "budget=9000"], "budget: given 9000.0; allowed: null in a search"),
    "cluster": (["-m", "budget=9000", "hydra/launcher=slurm"], "pilot_problems: given 24; allowed: 0 with"),
    "pilots": (["budget=9000", "pilot_problems=-1"], "pilot_problems: given -1; allowed: a whole number >= 0"),
}


@pytest.mark.parametrize(("arguments", "start"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_line(arguments, start):
    least = ["condition=ps"] if not any(text.startswith(("condition=", "sweep=")) for text in arguments) else []
    with refused(start=start):
        command = cli.check_command([*arguments[:1], *least, *arguments[1:]])
        budget.check(command)
        budget.with_settings(command, measure=False)


def test_a_budget_is_no_identity(make_config):
    assert identity_hash(make_config("condition=ps", "budget=900", "pilot_problems=3")) == identity_hash(
        make_config("condition=ps"))


def test_every_sampler_but_greedy_names_a_field_that_scales_its_cost(make_config):
    lacking = [name for name, found in components("sampler").items() if found.cls.cost_field is Sampler.cost_field]
    assert lacking == ["greedy"]
    for name in components("sampler"):
        draft = ("draft=tiny",) if name.startswith("draft") else ()
        for more in ([], ["sampler.wrapper=csmc", "sampler.resampling=multinomial"]) if name == "power_smc" else ([],):
            config = make_config(f"sampler={name}", *draft, *more)
            if field := config.sampler.cost_field():
                costs = [budget._estimate(config, field, setting) for setting in (2, 3, 10)]
                assert costs == sorted(set(costs))


def test_a_dry_run_chooses_by_the_estimate_and_draws_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "execute", lambda job: pytest.fail("a dry run draws nothing"))
    with pytest.raises(SystemExit):
        main([*TINY, "dry_run=true"])
    text = capsys.readouterr().out
    assert "the settings follow the estimates; nothing was measured" in text
    assert re.search(r"\| ps +\| +300 \| sampler\.num_steps=\d+ ", text)
    assert not list(tmp_path.iterdir())


def run_all(capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*TINY])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_settings_spend_the_budget_and_a_second_start_draws_nothing(capsys, monkeypatch, tmp_path):
    """The pilots are over the problems of the runs, so that the cost is measured exactly and only the rounding is left."""
    first = run_all(capsys)
    runs = [path.parent for path in (tmp_path / "outputs" / "default").glob("*/run.json")]
    spent: dict[str, list[float]] = {}
    for run in runs:
        identity = json.loads((run / "run.json").read_text())["identity"]
        records = read_records(run)
        spent.setdefault(identity["sampler"], []).append(sum(record["token_forwards"] for record in records) / 2)
    assert {name: len(costs) for name, costs in spent.items()} == {
        "greedy": 1, "temperature": 1, "power_mh": 2}
    assert spent["temperature"][0] == pytest.approx(700, rel=TOLERANCE)
    for cost, wanted in zip(sorted(spent["power_mh"]), BUDGETS, strict=True):
        assert cost == pytest.approx(wanted, rel=TOLERANCE)
    assert len(list((tmp_path / "outputs" / "default-pilots").glob("*/run.json"))) >= 3
    monkeypatch.setattr(loop._Loop, "run", lambda self: pytest.fail("nothing is left to draw"))
    second = run_all(capsys)
    assert second.partition("\n\n")[0] == first.partition("\n\n")[0]
    assert "5 jobs: 0 done now" in second


def test_a_budget_that_pays_for_no_unit_is_left_out_where_another_does(capsys):
    with pytest.raises(SystemExit):
        main(["-m", "condition=ps", "budget=200,9000", "dry_run=true"])
    row = next(line for line in capsys.readouterr().out.splitlines() if re.match(r"\| ps +\| +200 ", line))
    assert "sampler.num_steps=1 costs 371.6" in row


def test_the_estimate_is_that_of_the_plan_beside_it(capsys):
    """Six examples make prompts of several times the assumed length; both tables count them."""
    with pytest.raises(SystemExit):
        main(["condition=ps", "dataset.limit=4", "dataset.fewshot=6", "budget=1000", "dry_run=true"])
    chosen, planned = (line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ps "))
    assert chosen[4].strip() == planned[3].strip()


def test_a_single_run_takes_a_budget(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["condition=lookahead", "budget=900", "pilot_problems=0", *SHORT, "dataset.limit=1"])
    assert ended.value.code == 0
    assert "sampler.num_candidates=" in capsys.readouterr().out
    (run,) = (tmp_path / "outputs" / "default").glob("*/run.json")
    assert json.loads(run.read_text())["identity"]["sampler.num_candidates"] >= 2


def test_the_sweep_has_every_method():
    jobs = cli.check_command(["sweep=equal_cost", "experiment=demo"]).jobs
    assert {name_of(job.config.sampler) for job in jobs} == set(components("sampler")) - {"draft_mh", "draft_refine"}
    assert {job.config.budget for job in jobs} == {4000.0, 16000.0}
    (votes,) = {tuple(job.config.aggregates()) for job in jobs if name_of(job.config.sampler) == "temperature"}
    assert votes == ("majority", "power", "softsat", "answer_power", "adaptive")
