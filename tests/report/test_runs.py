"""Finding and reading runs: interrupted, torn, corrupt, of several experiments, and folders that are not runs."""

import dataclasses
import json

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.report.build import build
from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.sampler.power_smc import PowerSMC
from dflash_mcmc.sampler.temperature import Temperature
from dflash_mcmc.store.files import to_line
from tests.report.folders import SESSION, identity, record, write

PROBLEMS = [f"p{number}" for number in range(10)]


def records(correct: int, chains: int = 1, problems=PROBLEMS, **rest) -> list[dict]:
    return [record(problem, "correct" if number < correct else "wrong", chain, **rest)
            for number, problem in enumerate(problems) for chain in range(chains)]


def names(found) -> list[str]:
    return [run.folder.name for run in found]


class TestLocate:
    def test_experiment_glob_and_run_are_the_same_runs(self, tmp_path):
        first = write(tmp_path / "demo", "ps", records(5), session={"started": "2026-01-02"})
        second = write(tmp_path / "demo", "greedy", records(5), session={"started": "2026-01-01"})
        other = write(tmp_path / "other", "greedy", records(5), identity("greedy", seed=1))
        by_start = [second.name, first.name]
        assert names(run_folders([tmp_path / "demo"])) == by_start
        assert names(run_folders([f"{tmp_path}/demo/*"])) == by_start
        assert names(run_folders([first, second])) == by_start[::-1]
        assert names(run_folders([first, tmp_path / "demo"])) == by_start[::-1]  # each once
        digest = first.name[-12:]
        assert read(run_folders([first]))[0][0].digest == digest
        assert names(run_folders([f"{tmp_path}/*/*-{digest}"])) == [first.name]
        assert set(names(run_folders([tmp_path]))) == {first.name, second.name, other.name}

    @pytest.mark.parametrize(("given", "message"), [
        ([], "runs: given nothing; allowed: a run folder"),
        (["nowhere"], "runs: given 'nowhere', which is not a folder; allowed"),
        (["nowhere/*"], r"nowhere/\*: no run folder matches"),
    ])
    def test_nothing_found_is_one_line(self, tmp_path, given, message):
        with pytest.raises(UserError, match=message) as error:
            run_folders(given)
        assert "\n" not in str(error.value)
        with pytest.raises(UserError, match="no finished sample here"):
            run_folders([tmp_path])

    def test_a_folder_inside_a_run_folder_is_not_another_run(self, tmp_path):
        run = write(tmp_path / "demo", "ps", records(5))
        write(run / "wandb", "ps", records(5))
        assert names(run_folders([tmp_path])) == [run.name]


class TestRead:
    def test_interrupted_run_says_so_and_stays_correct(self, undrawn, tmp_path):
        whole = write(tmp_path / "demo", "greedy", records(5))
        part = write(tmp_path / "demo", "ps", records(4, problems=PROBLEMS[:6]), limit=10, finished=False)
        built = build([tmp_path / "demo"])
        greedy, ps = sorted(built.studies[0].runs, key=lambda run: run.label)
        assert greedy.complete
        assert (ps.complete, ps.expected, ps.shown) == (False, 10, "ps (not complete: 6 of 10 samples)")
        assert any("ps (not complete: 6 of 10 samples)" in warning for warning in built.parts[0].warnings)
        assert any("6 of 10 problems are in all runs" in warning for warning in built.parts[0].warnings)
        page, text = built.page.read_text(), built.overall
        assert "ps (not complete: 6 of 10 samples)" in page
        row = next(line for line in text.splitlines() if "not complete" in line)
        assert [cell.strip() for cell in row.strip("|").split("|")][1:4] == ["4", "6", "66.7 %"]
        paired = next(section for section in built.parts[0].sections if section.name == "paired").tables[0].rows[0]
        assert (paired["problems"], paired["left_out"]) == (6, 4)
        assert paired["difference"] == pytest.approx((4 - 5) / 6)  # greedy solves 5 of the first 6
        assert {whole.name, part.name} == {run.folder.name for run in built.studies[0].runs}

    @pytest.mark.parametrize(("finished", "limit", "chains", "expected"), [
        (True, 1000, 1, 10),  # the limit is larger than the dataset; a finished run has all its problems
        (False, 1000, 1, 1000), (False, 10, 4, 40), (False, 10, 1, 10),
    ])
    def test_expected_records(self, tmp_path, finished, limit, chains, expected):
        run = write(tmp_path / "demo", "ps", records(5), limit=limit, num_chains=chains, finished=finished)
        assert read(run_folders([run]))[0][0].expected == expected

    def test_a_second_start_that_asked_for_more_and_was_killed(self, tmp_path):
        """The summary is from the first start and counts every record, but the run is not finished."""
        run = write(tmp_path / "demo", "ps", records(5), num_chains=1)
        content = json.loads((run / "run.json").read_text())
        content["sessions"].append({**SESSION, "num_problems": 10})
        (run / "run.json").write_text(json.dumps(content))
        config = json.loads((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(json.dumps({**config, "num_chains": 4}))
        (found,), _ = read(run_folders([run]))
        assert (found.expected, found.complete) == (40, False)

    def test_samples_no_longer_asked_for_do_not_hide_missing_ones(self, tmp_path):
        """First a hundred problems; then four chains of twenty problems, killed after one record: 59 are missing."""
        made = [record(f"p{number}") for number in range(100)] + [record("p0", chain=1)]
        run = write(tmp_path / "demo", "ps", made, limit=20, num_chains=4, finished=False)
        (found,), _ = read(run_folders([run]))
        assert (found.expected, len(found.records), found.complete) == (80, 101, False)
        whole = made + [record(f"p{number}", chain=chain) for number in range(20) for chain in range(1 + (number == 0), 4)]
        (run / "records.jsonl").write_bytes(b"".join(map(to_line, whole)))
        assert read(run_folders([run]))[0][0].complete

    def test_a_torn_last_line_is_no_error(self, tmp_path):
        run = write(tmp_path / "demo", "ps", records(5), finished=False)
        with (run / "records.jsonl").open("a") as file:
            file.write('{"problem": "p10", "cha')
        for lenient in (False, True):
            (found,), left_out = read(run_folders([run]), lenient)
            assert (len(found.records), left_out) == (10, [])

    @pytest.mark.parametrize(("line", "strict"), [
        ('{"problem": "p3", "chain"', r"records\.jsonl: line 4: JSON: Expecting ':' delimiter"),
        ("[]", r"records\.jsonl: line 4: checksum: given a line without one"),
        (to_line({"problem": "p3", "chain": 0}).decode().strip(),
         r"records\.jsonl: line 4: level: given nothing; allowed: a value"),
    ])
    def test_a_corrupt_line_is_an_error_and_left_out_if_lenient(self, undrawn, tmp_path, line, strict):
        run = write(tmp_path / "demo", "ps", records(5))
        lines = (run / "records.jsonl").read_text().splitlines()
        (run / "records.jsonl").write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n")
        with pytest.raises(UserError, match=strict) as error:
            build([run])
        assert "\n" not in str(error.value)
        built = build([run], lenient=True)
        assert [len(found.records) for found in built.studies[0].runs] == [9]
        message = "records.jsonl: line 4: "
        assert any(message in warning for warning in built.parts[0].warnings)
        assert built.page.read_text().index(message) < built.page.read_text().index("<h2>")
        assert "not complete: 9 of 10" in built.overall

    def test_a_repeated_record_counts_once_and_is_reported(self, tmp_path, capsys):
        run = write(tmp_path / "demo", "ps", records(5))
        with (run / "records.jsonl").open("a") as file:
            file.write(to_line(record("p0")).decode())
        (strict,), none = read(run_folders([run]))
        assert "records.jsonl: line 11 repeats problem p0, chain 0" in capsys.readouterr().err
        (lenient,), (message,) = read(run_folders([run]), lenient=True)
        assert "records.jsonl: line 11 repeats problem p0, chain 0" in message
        assert len(strict.records) == len(lenient.records) == 10
        assert not none

    def test_a_run_with_an_unreadable_file(self, tmp_path):
        good = write(tmp_path / "demo", "greedy", records(5))
        bad = write(tmp_path / "demo", "ps", records(5))
        for name, content, message in (("run.json", "{", "cannot be parsed"), ("run.json", "{}", "identity: given nothing"),
                                    ("config.yaml", "a: [", "cannot be parsed"), ("config.yaml", "a: 1", "holds no conf")):
            kept = (bad / name).read_text()
            (bad / name).write_text(content)
            with pytest.raises(UserError, match=f"{bad}.*{name}: {message}") as error:
                read(run_folders([tmp_path]))
            assert "\n" not in str(error.value)
            found, left_out = read(run_folders([tmp_path]), lenient=True)
            assert ([run.folder for run in found], len(left_out)) == ([good], 1)
            (bad / name).write_text(kept)
        (bad / "config.yaml").unlink()
        with pytest.raises(UserError, match=r"config.yaml: cannot be read"):
            read(run_folders([tmp_path]))

    def test_a_run_without_samples(self, tmp_path):
        write(tmp_path / "demo", "greedy", records(5))
        empty = write(tmp_path / "demo", "ps", records(5))
        (empty / "records.jsonl").write_text("")
        with pytest.raises(UserError, match=f"{empty}: no finished sample here"):
            read(run_folders([empty]))
        found, left_out = read(run_folders([tmp_path]))  # not named as a run folder itself
        assert (len(found), left_out) == (1, [f"left out: {empty}: no finished sample here"])

    def test_a_probe_run(self, tmp_path):
        probe = write(tmp_path / "demo", "ps", [{"problem": "a", "chain": 0}] * 0 + records(1), {
            **identity("ps"), "probe": "layer_rank"})
        with pytest.raises(UserError, match="a probe run, probe=layer_rank"):
            read(run_folders([probe]))
        write(tmp_path / "demo", "greedy", records(5))
        found, left_out = read(run_folders([tmp_path]))
        assert [run.condition for run in found] == ["greedy"]
        assert "probe=layer_rank" in left_out[0]

    def test_runs_of_several_experiments_say_which(self, undrawn, tmp_path):
        write(tmp_path / "a", "greedy", records(5))
        write(tmp_path / "b", "greedy", records(6))
        write(tmp_path / "b", "ps", records(6))
        found, _ = read(run_folders([tmp_path]))
        assert sorted(run.label for run in found) == ["a: greedy", "b: greedy", "b: ps"]
        assert build([tmp_path]).folder == tmp_path.resolve() / "report"

    def test_labels_differ(self, tmp_path):
        for seed in (0, 1):
            write(tmp_path / "demo", "ps", records(5), identity("ps", seed=seed))
        again = write(tmp_path / "copy" / "demo", "ps", records(5), identity("ps", seed=1))
        labels = [run.label for run in read(run_folders([tmp_path / "demo", again]))[0]]
        assert sorted(labels) == ["ps seed=0", "ps seed=1", "ps seed=1 (2)"]

    def test_the_runs_of_a_sweep_are_sorted_by_their_values(self, tmp_path):
        for alpha, start in ((8.0, "1"), (2.0, "2"), (4.0, "3")):
            made = identity("ps", sampler__alpha=alpha, sampler__proposal_temperature=1.0 / alpha)
            write(tmp_path / "demo", "ps", records(5), made, session={"started": start})
        found = read(run_folders([tmp_path / "demo"]))[0]
        assert [run.label for run in found] == ["ps alpha=2", "ps alpha=4", "ps alpha=8"]  # the temperature is 1/alpha
        named = read(run_folders([found[place].folder for place in (2, 0, 1)]))[0]  # in the order of the command line
        assert [run.label for run in named] == ["ps alpha=8", "ps alpha=2", "ps alpha=4"]


@pytest.mark.parametrize(("sampler", "newer", "older", "power"), [
    (PowerSMC(alpha=2.0, wrapper="pimh"), (), {}, 2.0), (PowerSMC(alpha=2.0, wrapper="pimh"), (), {"gone": 1}, None),
    (Temperature(temperature=1.0), ("order", "typical_p", "top_n_sigma"), {}, 1.0)], ids=["same", "older", "newer"])
def test_the_law_of_a_run_of_an_older_sampler(tmp_path, sampler, newer, older, power):
    """A field that this code does not know makes another sampler; one that is newer than the run has its default there."""
    name = "power_smc" if isinstance(sampler, PowerSMC) else "temperature"
    fields = {key: value for key, value in dataclasses.asdict(sampler).items() if key not in newer}
    folder = write(tmp_path, "ps", records(3), {**identity("ps"), "sampler": name},
                   config={"sampler": {"name": name, **fields, **older}})
    assert [run.power for run in read(run_folders([folder]))[0]] == [power]
