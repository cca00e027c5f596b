"""What every probe can rely on: its records are kept, completed and put in order, and nothing else is loaded for it."""

import copy
import json
import os
import signal
from dataclasses import dataclass

import pytest
import torch

from dflash_mcmc import components
from dflash_mcmc.components import GROUPS, MISSING, identity, name_of, registered, runtime
from dflash_mcmc.config import command
from dflash_mcmc.config.identity import identity_hash, identity_of, plain, run_folder
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.probe import Probe, Summary, Unit
from dflash_mcmc.process.stopping import Stopped
from dflash_mcmc.report.parts import csv_of, of_probes
from dflash_mcmc.store.files import from_line
from dflash_mcmc.store.folder import Attempts, RunStore
from dflash_mcmc.store.records import RECORDS
from tests.runs import execute
from tests.tracker import lines as tracked

PROBES = [component.cls for component in registered("probe").values() if component.name != "none"]


@dataclass(slots=True, kw_only=True)
class Lengths(Probe):
    """Lengths of questions, from the last to the first."""

    times: int = identity(MISSING, "factor", ge=1)
    fails_after: int | None = runtime(None, "records, for tests")

    uses = ("dataset",)
    unit = "question"

    def units(self, config):
        return [Unit(problem.id) for problem in config.dataset.problems()]

    def measure(self, config, work):
        questions = {problem.id: problem.question for problem in config.dataset.problems()}
        for number, unit in enumerate(reversed(list(work))):
            if number == self.fails_after:
                raise UserError("no more")
            yield unit, {"length": self.times * len(questions[unit.problem])}

    def summarise(self, config, records):
        lengths = [record["length"] for record in records]
        return Summary({"longest": max(lengths)}, {"all": [{"length": length} for length in lengths]}, {})

    def figures(self, config, records, summary):
        from matplotlib.figure import Figure

        return {"lengths": Figure(figsize=(1, 1))}


@pytest.fixture
def lengths(make_config, monkeypatch):
    """A configuration with the probe above: lengths(seed=1, limit=3, times=2)."""
    component = components.Registration("probe", "lengths", Lengths, Lengths.__doc__)
    monkeypatch.setitem(components._components, ("probe", "lengths"), component)
    tracked.use(monkeypatch.setattr)
    base = make_config("tracker=trackio")

    def make(limit=5, times=1, fails_after=None, seed=0):
        config = copy.deepcopy(base)
        config.dataset.limit, config.seed = limit, seed
        config.probe = Lengths(times=times, fails_after=fails_after)
        return config

    return make


def lines(folder) -> list[dict]:
    return [from_line(line) for line in (folder / RECORDS).read_bytes().splitlines()]


@pytest.mark.parametrize("cls", PROBES, ids=lambda cls: cls.__name__)
def test_every_probe_has_what_a_probe_has(cls):
    assert set(cls.uses) <= set(GROUPS) - {"probe", "hardware", "tracker"}
    assert cls.unit
    assert all(callable(getattr(cls, name)) for name in ("units", "measure", "summarise", "figures"))


def test_records_are_kept_and_summarised_in_the_order_of_the_units(lengths, tmp_path):
    config = lengths()
    result = execute(config)
    ids = [problem.id for problem in config.dataset.problems()]
    assert [(record["problem"], record["chain"]) for record in lines(result.folder)] == [(name, 0) for name in reversed(ids)]
    expected = [len(problem.question) for problem in config.dataset.problems()]
    assert [row["length"] for row in result.summary["tables"]["all"]] == expected
    assert result.summary == json.loads((result.folder / "summary.json").read_text())
    assert (result.folder / "all.csv").read_text().splitlines() == ["length", *map(str, expected)]
    told = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in told] == [1, 2, 3, 4, 5, None, None]
    assert told[0] == {"step": 1, "unit/length": expected[-1]}
    assert told[-2:] == [{"summary": {"longest": max(expected)}}, {"tables": {"all": 5}, "figures": ["lengths.png"]}]
    assert (result.folder / "lengths.png").is_file()
    assert json.loads((result.folder / "run.json").read_text())["sessions"][0]["command"]


def test_a_stopped_probe_goes_on_and_more_units_continue_it(lengths):
    with pytest.raises(UserError, match="no more"):
        execute(lengths(fails_after=2))
    again, more = execute(lengths()), execute(lengths(limit=7))
    assert (again.num_new, more.num_new) == (3, 2)
    assert again.folder == more.folder
    before = (more.folder / "metrics.jsonl").read_text()
    less = execute(lengths())
    assert (less.num_new, less.num_beyond) == (0, 2)
    assert (more.folder / "metrics.jsonl").read_text() == before  # the tracker has been told all of it
    told = [json.loads(line) for line in before.splitlines()]
    assert [line["step"] for line in told if "step" in line] == list(range(1, 8))
    assert len([line for line in told if "summary" in line]) == 2
    assert less.summary["num_units"] == 7


def test_what_is_refused_before_the_first_record_leaves_nothing(lengths, tmp_path):
    with pytest.raises(UserError, match="no more"):
        execute(lengths(fails_after=0))
    assert list(tmp_path.iterdir()) == []


def test_a_unit_that_is_taken_and_not_recorded_is_an_error(lengths, monkeypatch):
    measure = Lengths.measure
    monkeypatch.setattr(Lengths, "measure", lambda self, config, work: list(measure(self, config, work))[1:])
    with pytest.raises(RuntimeError, match="taken 5 units and recorded 4"):
        execute(lengths())


def died(config, *units):
    """Leaves what a process leaves that dies while it measures these units."""
    with RunStore.open(run_folder(config, identity_hash(config))) as store:
        attempts = Attempts(store)
        for unit in units:
            attempts.note(unit, begun=True)


def test_a_unit_that_was_in_progress_at_two_deaths_is_named(lengths, capsys):
    config = lengths()
    first, suspect, *_ = config.probe.units(config)
    died(config, first, suspect)
    died(config, suspect)
    result = execute(config)
    assert f"begun and never finished: problem {suspect.problem}, chain 0 (2 times); if" in capsys.readouterr().err
    assert result.summary["num_units"] == 5
    assert not list(result.folder.glob("attempts*"))


def test_deaths_before_the_first_record_outlive_a_refusal(lengths):
    config = lengths()
    died(config, *config.probe.units(config)[:1])
    with pytest.raises(UserError, match="no more"):
        execute(lengths(fails_after=0))
    with RunStore.open(run_folder(config, identity_hash(config))) as store:
        assert Attempts(store).unfinished()[config.probe.units(config)[0]] == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt, torch.OutOfMemoryError("CUDA out of memory")])
def test_units_that_are_given_up_again_and_again_are_no_suspects(end, lengths, capsys, monkeypatch):
    for _ in range(3):
        with monkeypatch.context() as interrupted:
            interrupted.setattr(RunStore, "append", lambda *_: (_ for _ in ()).throw(end))
            with pytest.raises(end if isinstance(end, type) else type(end)):
                execute(lengths())
    assert execute(lengths()).num_new == 5
    assert "never finished" not in capsys.readouterr().err


def test_at_a_signal_the_unit_in_progress_is_finished_and_the_next_start_measures_the_rest(lengths, monkeypatch):
    def one_by_one(self, config, work):
        for number, unit in enumerate(work):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield unit, {"length": number}

    config = lengths()
    with monkeypatch.context() as signalled:
        signalled.setattr(Lengths, "measure", one_by_one)
        with pytest.raises(Stopped, match="SIGTERM"):
            execute(config)
    folder = run_folder(config, identity_hash(config))
    assert [record["length"] for record in lines(folder)] == [0, 1]
    assert not (folder / "summary.json").exists()
    begun = [json.loads(line)["begun"] for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert begun == [True, True]  # nothing else was begun, and nothing was given up
    result = execute(config)
    assert (result.num_new, result.summary["num_units"]) == (3, 5)


def test_identity_is_that_of_the_groups_in_use(lengths, monkeypatch):
    monkeypatch.setattr("dflash_mcmc.model.hf.HFModel.fingerprint", lambda self: pytest.fail("read the model"))
    config = lengths()
    found = identity_of(config)
    assert {name.partition(".")[0] for name in found} == {"version", "probe", "dataset", "seed"}
    assert found.keys() >= {"dataset.content", "probe.times", "dataset.prompt", "dataset.max_new_tokens"}
    other = lengths(limit=9)
    other.model.dtype, other.sampler.alpha = "bfloat16", 2.0
    assert identity_of(other) == found
    assert identity_of(lengths(times=2)) != found != identity_of(lengths(seed=1))
    assert run_folder(config, "x").name == "lengths-arith-x"
    assert config.label() == "lengths"
    assert not {"model", "sampler", "condition", "draft"} & plain(config).keys()


def test_without_a_probe_nothing_of_it_is_in_the_identity(make_config):
    assert not [name for name in identity_of(make_config()) if name.startswith("probe")]
    assert make_config().label() == "power_mh"


@pytest.mark.parametrize("given", ["model=tiny", "++sampler.alpha=2", "dataset.limit=3", "condition=ps", "num_chains=2"])
def test_what_a_probe_does_not_use_is_refused(given):
    command.prepare()
    with pytest.raises(UserError) as caught:
        command.check_command(["probe=rejection_sampling", given])
    name, _, value = given.removeprefix("++").partition("=")
    assert f"{name}: given {value!r}; allowed: no override of {name.partition('.')[0]}, since probe=rejection_sampling " in (
        str(caught.value))


def test_what_a_probe_uses_is_taken():
    command.prepare()
    command.check_command(["probe=rejection_sampling", "seed=3", "hardware.device=cpu", "tracker=none",
                           "probe.num_draws=1000"])
    command.check_command(["probe=none", "sampler.alpha=2"])


def test_a_draft_of_an_experiment_that_the_probe_does_not_use_is_left_out(make_config, capsys):
    note.cache_clear()
    assert name_of(make_config("experiment=faults", "probe=rejection_sampling").draft) == "none"
    assert capsys.readouterr().err == "draft=ngram is left out where no probe uses it\n"


def test_runs_of_a_sweep_share_a_table_behind_what_varies(lengths):
    folders = [execute(lengths(limit=1, times=times)).folder for times in (1, 2)]
    header, _, first, second = of_probes(folders).splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, first, second)]
    assert cells[0] == ["times", "length"]
    assert [row[0] for row in cells[1:]] == ["1", "2"]
    assert int(cells[2][1]) == 2 * int(cells[1][1])
    assert "times" not in of_probes(folders[:1])


def test_csv_keeps_all_digits():
    assert csv_of([{"a": 1 / 3, "b": None}, {"a": 2, "c": "x"}]) == f"a,b,c\n{1 / 3!r},,\n2,,x\n"


# A run whose records were damaged stops with a line, and with repair=true draws the damaged samples again.

SHORT = ("sampler=greedy", "dataset.limit=3", "dataset.max_new_tokens=16")


def test_an_emptied_configuration_is_written_again(make_config, capsys):
    """A complete run draws nothing, and its report reads this file."""
    path = execute(make_config(*SHORT)).folder / "config.yaml"
    whole = path.read_text()
    for damage in (lambda: path.write_text("\n"), path.unlink):
        damage()
        execute(make_config(*SHORT))
        assert path.read_text() == whole
    assert "config.yaml: has no configuration, and is written again" in capsys.readouterr().err
