"""The choice of a setting: nearest to the budget, monotone, and corrected by measured costs."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_mcmc
from dflash_mcmc.api.choices import override
from dflash_mcmc.config.identity import configuration_of, identity_hash, identity_of, literal, node_of
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading.verdicts import NOT_DRAWN, TOO_LONG
from dflash_mcmc.grid.snapshot import read_point, write_point
from dflash_mcmc.regrade import grader_config, regrade
from dflash_mcmc.report.table import overall
from dflash_mcmc.runner.budget import MOST, CostCurve
from dflash_mcmc.store import finishes
from dflash_mcmc.store.described import PROBLEMS, add_problems, described, read_problems
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import read_records
from tests.conftest import ROOT
from tests.runs import execute, records_of, same


def true_cost(setting: int) -> float:
    """Draws that share forwards: the cost rises more slowly than the number of draws."""
    return 60.0 + 90.0 * setting**0.8


def estimate(setting: int) -> float:
    return 57.0 + 40.0 * setting


def settled(budgets: list[float]) -> CostCurve:
    """A curve after three measurements for each budget, in ascending order, as the pilots make them."""
    curve = CostCurve(estimate, 1)
    for budget in budgets:
        for _ in range(3):
            setting = curve.nearest(budget)
            curve.measured[setting] = true_cost(setting)
    return curve


def test_the_nearest_setting_is_that_of_a_search_over_all():
    curve = CostCurve(estimate, 2)
    for budget in (10.0, 137.0, 158.0, 900.0, 12_345.0):
        assert curve.nearest(budget) == min(range(2, 2000), key=lambda n: max(budget / curve.cost(n), curve.cost(n) / budget))


def test_the_choice_is_monotone_in_the_budget_before_and_after_measurements():
    for curve in (CostCurve(estimate, 1), settled([500.0, 4000.0])):
        chosen = [curve.nearest(budget) for budget in range(100, 20_000, 37)]
        assert chosen == sorted(chosen)
        costs = [curve.cost(setting) for setting in range(1, 400)]
        assert all(a < b for a, b in itertools.pairwise(costs))


@pytest.mark.parametrize("budget", [500.0, 2000.0, 8000.0, 30_000.0])
def test_three_measurements_bring_the_cost_within_five_per_cent(budget):
    before = true_cost(CostCurve(estimate, 1).nearest(budget))
    after = true_cost(settled([budget]).nearest(budget))
    assert abs(after - budget) < 0.05 * budget + 40.0  # 40: half of the step between two settings
    assert abs(after - budget) < abs(before - budget)


def test_a_measured_setting_has_its_measured_cost():
    curve = settled([500.0, 4000.0])
    assert all(curve.cost(setting) == pytest.approx(cost) for setting, cost in curve.measured.items())


def test_a_cost_that_does_not_rise_is_no_endless_search():
    with pytest.raises(ValueError, match="less than the budget of 9"):
        CostCurve(lambda setting: 8.0, 1).nearest(9.0)
    assert MOST >= 100_000


# Every condition of `conf/condition`: a start that dies within a run loses nothing and changes nothing.

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


# `dataset.stop` and the reasons why answers ended, in a run: records, summary, table, problems, and the same from Python.

STOP = ["er:", "="]
RUN = ("sampler=temperature", "dataset.max_new_tokens=6", f"dataset.stop={STOP}", "tracker=none")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return dflash_mcmc.run(*RUN, "dataset.limit=6", f"paths.outputs={tmp_path_factory.mktemp('outputs')}")


def test_records_say_why_answers_ended(done):
    records = read_records(done.folder)
    reasons = [record["finish_reason"] for record in records]
    assert set(reasons) == {finishes.STOP_STRING, finishes.LENGTH}
    tokenizer = AutoTokenizer.from_pretrained(dflash_mcmc.component("model", "tiny").path)
    for record in records:
        whole, found = tokenizer.decode(record["tokens"]), record["finish_reason"] == finishes.STOP_STRING
        assert record["ended"] == found == any(string in whole for string in STOP)
        assert not any(string in record["text"] for string in STOP)
        assert whole.startswith(record["text"])
        assert (record["num_tokens"] == 6) >= (not found)
    assert done.summary["finish_reason/length"] == reasons.count("length") > 0
    assert sum(done.summary[f"finish_reason/{reason}"] for reason in finishes.REASONS) == len(records)
    line, = (line for line in overall([done.folder]).splitlines() if "cut off" in line)
    assert line.endswith(f": {reasons.count('length')} of 6 answers were cut off at dataset.max_new_tokens=6; "
                         f"{reasons.count('stop_string')} of 6 ended with a string of dataset.stop.")


def test_python_draws_the_tokens_of_the_command_line(done):
    folder = dflash_mcmc.component("model", "tiny").path
    loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    questions = {name: problem["question"] for name, problem in read_problems(done.folder).items()}
    samples = dflash_mcmc.sample(*loaded, questions, sampler="temperature", max_new_tokens=6, stop=STOP, progress=False)
    assert len(samples) == 6
    for record, sample in zip(sorted(read_records(done.folder), key=lambda each: each["problem"]), samples, strict=True):
        for name in ("text", "tokens", "finish_reason"):
            assert getattr(sample, name) == record[name]


def test_problems_are_written_once_and_completed_by_the_next_start(tmp_path):
    run = (*RUN, f"paths.outputs={tmp_path}")
    folder = dflash_mcmc.run(*run, "dataset.limit=2").folder
    first = (folder / PROBLEMS).read_text()
    problem = json.loads(first.splitlines()[0])
    assert list(problem) == ["id", "question", "gold", "prompt", "checksum"]
    assert problem["question"] in problem["prompt"]
    assert problem["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    dflash_mcmc.run(*run, "dataset.limit=3")
    assert (folder / PROBLEMS).read_text().startswith(first)
    (folder / PROBLEMS).unlink()
    dflash_mcmc.run(*run, "dataset.limit=4")
    assert list(read_problems(folder)) == [record["problem"] for record in read_records(folder)]


def test_problems_of_other_processes_are_kept(tmp_path):
    made = [{"id": str(number), "question": "q", "gold": "1", "prompt": "q"} for number in range(3)]
    for asked in (made[:2], made[1:]):
        add_problems(tmp_path, lambda known, asked=asked: [problem for problem in asked if problem["id"] not in known])
    assert list(read_problems(tmp_path)) == ["0", "1", "2"]
    add_problems(tmp_path, lambda known: [] if len(known) == 3 else pytest.fail("a known problem was asked for"))
    (tmp_path / PROBLEMS).write_text("{\n")
    with pytest.raises(dflash_mcmc.errors.UserError, match=r"problems\.jsonl: line 1: JSON: .*; delete the file"):
        read_problems(tmp_path)


def test_reasons_of_older_records_are_derived():
    older = [({"verdict": "correct", "ended": True}, "stop_id"), ({"verdict": "wrong", "ended": False}, "length"),
             ({"verdict": NOT_DRAWN, "ended": False}, "not_drawn"), ({"verdict": TOO_LONG, "ended": False}, "too_long"),
             ({"verdict": "wrong", "ended": True, "finish_reason": "stop_string"}, "stop_string")]
    assert [finishes.of_record(record) for record, _ in older] == [reason for _, reason in older]
    assert finishes.remark({}, 64) == ""
    assert finishes.remark({"finish_reason/stop_id": 2, "finish_reason/length": 24}, 64) == (
        "24 of 26 answers were cut off at dataset.max_new_tokens=64")


def test_stops_are_identity_only_where_there_are_some(make_config):
    without, some = make_config(), make_config("dataset.stop=[a]")
    assert "dataset.stop" not in identity_of(without)
    assert identity_of(some)["dataset.stop"] == ["a"]
    assert identity_hash(some) != identity_hash(without)


@pytest.mark.parametrize(("overrides", "said"), [
    (["dataset.stop=['']"], "dataset.stop: given ''; allowed: texts of at least one character"),
    ([f"dataset.stop=[{'a' * 129}]"], "dataset.stop: given 'a text of 129 characters'; allowed: at most"),
    (["dataset.stop=[a]", "probe=difficulty", "draft=tiny"], "dataset.stop: given ['a']; allowed: [] with probe=difficulty"),
], ids=str)
def test_what_cannot_stop_is_refused(make_config, overrides, said):
    with pytest.raises(ConfigError) as caught:
        make_config(*overrides)
    assert str(caught.value).startswith(said)


def test_a_backslash_and_an_n_are_no_line_feed(make_config, capsys):
    make_config(r"dataset.stop=['\nQuestion:','\nabla']")
    said = capsys.readouterr().err
    assert said.count("has a backslash and an n") == 1
    assert make_config('dataset.stop=["\nQuestion:"]').dataset.stop == ["\nQuestion:"]
    assert not capsys.readouterr().err


BRIEF = ("sampler=temperature", "num_chains=2", "dataset.limit=2", "dataset.max_new_tokens=2")


def test_a_complete_run_renews_what_describes_it(make_config):
    """Its votes are those of the last command, and lost files are written again."""
    folder = execute(make_config(*BRIEF)).folder
    problems, before = (folder / PROBLEMS).read_bytes(), described(folder / "run.json")
    for name in (PROBLEMS, "run.json"):
        (folder / name).unlink()
    assert execute(make_config(*BRIEF, "aggregate=majority")).num_new == 0
    assert configuration_of(folder)["aggregate"] == "majority"
    assert (folder / PROBLEMS).read_bytes() == problems
    after = described(folder / "run.json")
    assert after.identity == before.identity
    assert [start["num_problems"] for start in after.sessions] == [2]


def test_texts_with_the_marks_of_a_field_stay_as_they_are(make_config, tmp_path):
    text = "{question} ${x} ${ \\${y} 1e-05"
    config = make_config(*BRIEF, override("dataset.prompt", literal(text)), "sampler.presence_penalty=1e-05")
    assert config.dataset.prompt == text
    folder = execute(config).folder
    recorded = configuration_of(folder)
    assert (recorded["dataset"]["prompt"], recorded["sampler"]["presence_penalty"]) == (text, 1e-05)
    assert OmegaConf.to_object(node_of("dataset", recorded["dataset"])) == config.dataset
    write_point(tmp_path / "point.yaml", config, ROOT)
    assert read_point(tmp_path / "point.yaml").dataset.prompt == text
    grader = grader_config(["grader.timeout_seconds=4"])
    with closing(grader.grader.start()) as pool:
        assert configuration_of(regrade(folder, grader, pool).target)["dataset"] == recorded["dataset"]
