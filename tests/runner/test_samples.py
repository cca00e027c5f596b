"""A run: resumed, extended, killed and shared ones end in the same records as an uninterrupted one, but for times."""

import importlib
import json
import os
import re
import signal

import pytest

from dflash_mcmc import tokenizer
from dflash_mcmc.__main__ import main
from dflash_mcmc.engine.batching.chains import Meter
from dflash_mcmc.runner import loop, plan
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.records import RECORDS, records_file
from tests import processes
from tests.conftest import ROOT
from tests.runs import NUM_WHOLE, QUICK, WHOLE, execute, finish, folder_of, records_of, same, start, wait_for_records


def test_a_run_encodes_each_prompt_once(monkeypatch, tmp_path):
    texts, ids_of = [], tokenizer.ids_of
    monkeypatch.setattr(tokenizer, "ids_of", lambda *given: (texts.append(given[1]), ids_of(*given))[1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["sampler=greedy", "dataset.limit=3", "dataset.max_new_tokens=1", "tracker=none", "num_chains=2"])
    assert len(texts) == len(set(texts)) == 3


def test_folder_holds_what_it_should(make_config, tmp_path):
    result = execute(make_config(*QUICK, "dataset.limit=3"))
    assert {p.name for p in result.folder.iterdir()} == {"config.yaml", "run.json", RECORDS, "problems.jsonl", "summary.json",
                                                         "lock"}
    run = json.loads((result.folder / "run.json").read_text())
    session = run["sessions"][0]
    assert run["identity"]["sampler.alpha"] == 4.0
    assert session["packages"]["torch"]
    assert session["device"]
    assert session["command"]
    if (ROOT / ".git").exists():
        assert len(session["commit"]) == 40
        assert session["dirty"] in (True, False)
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary == result.summary
    for name in ("condition", "num_problems", "correct", "accuracy", "accuracy_low", "accuracy_high", "mean_tokens",
                 "mean_seconds", "acceptance", "moved_rate", "token_forwards"):
        assert name in summary
    record = json.loads((result.folder / RECORDS).read_text().splitlines()[0])
    assert record["verdict"] in ("correct", "wrong", "no_answer")
    assert len(record["tokens"]) == record["num_tokens"]
    assert record["tokens_drawn"] >= record["num_tokens"]
    assert record["token_forwards"] >= record["tokens_drawn"]
    assert len(record["trace"]) == record["proposals"] == 4
    assert 0 < record["prefill_seconds"] < record["share_seconds"]
    assert record["grade_seconds"] >= 0
    parts = summary["mean_prefill_seconds"] + summary["mean_draw_seconds"]
    assert parts == pytest.approx(summary["mean_share_seconds"], abs=1e-5)
    assert "num_steps: 1" in (result.folder / "config.yaml").read_text()


def test_complete_run_draws_nothing_and_loads_no_model(make_config, monkeypatch):
    first = execute(make_config(*QUICK, "dataset.limit=3"))
    monkeypatch.setattr("dflash_mcmc.model.hf.HFModel.load", lambda *_: pytest.fail("loaded a model"))
    second = execute(make_config(*QUICK, "dataset.limit=3"))
    assert (first.num_new, second.num_new) == (3, 0)
    assert first.summary == second.summary


def test_fewer_problems_than_recorded_is_told(make_config, capsys, tmp_path):
    execute(make_config("sampler=greedy", "dataset.limit=4"))
    assert execute(make_config("sampler=greedy", "dataset.limit=3")).num_beyond == 1
    with pytest.raises(SystemExit, match="0"):
        main(["sampler=greedy", "dataset.limit=2", "tracker=none", f"paths.outputs={tmp_path}"])
    assert "2 recorded samples that were not requested are counted as well" in capsys.readouterr().out


@pytest.mark.slow
def test_more_problems_and_more_chains_continue_the_run(make_config, uninterrupted):
    first = execute(make_config(*QUICK, "dataset.limit=5"))
    second = execute(make_config(*QUICK, "dataset.limit=8"))
    third = execute(make_config(*QUICK, *WHOLE))
    assert first.folder == second.folder == third.folder
    assert (first.num_new, second.num_new, third.num_new) == (5, 3, 8)
    same(records_of(third.folder), uninterrupted)
    run = json.loads((third.folder / "run.json").read_text())
    assert len(run["sessions"]) == 3


@pytest.mark.slow
def test_two_processes_share_a_run_and_end_in_the_same_records(tmp_path, uninterrupted):
    command = ["-m", "dflash_mcmc", "experiment=demo", *QUICK, "num_chains=2"]
    ranks = processes.start_ranks(2, [*command, "dataset.limit=6"], tmp_path)
    told = [rank.communicate(300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert ["12 new samples" in output and "| condition" in output for output, _ in told] == [True, False]
    assert "| condition" not in told[1][0]
    folder = folder_of(tmp_path)
    assert json.loads((folder / "summary.json").read_text())["num_samples"] == 12
    by_process = [len(path.read_bytes().splitlines()) for path in folder.glob("records*.jsonl")]
    elsewhere = re.search(r"12 new samples(?:, (\d+) of them drawn by other processes)?", told[0][0])
    assert int(elsewhere[1] or 0) in (by_process if len(by_process) == 2 else [0])
    assert sum(by_process) == 12
    same(finish(tmp_path), uninterrupted)
    again = [rank.communicate(300)[0] for rank in processes.start_ranks(2, [*command, "dataset.limit=8"], tmp_path)]
    assert ["already complete, nothing drawn" in told for told in again] == [True, False]
    same(records_of(folder), uninterrupted)


def test_a_mistake_is_left_to_the_first_process_to_tell(monkeypatch, capsys):
    """A launcher ends all processes with the first that goes: one that told nothing and went took the message with it."""
    entrypoint, told = importlib.import_module("dflash_mcmc.__main__"), []
    # Not time.sleep itself: threads of other tests, as a tracker's, sleep too.
    monkeypatch.setattr(plan, "sleep", lambda seconds: told.append((seconds, capsys.readouterr().err)))
    for rank, waited, before in (("1", [(60.0, "")], "error (process 1): "), ("0", [], "error: ")):
        told.clear()
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            entrypoint.main(["sampler.alpha=-1"])
        assert ended.value.code == 2
        assert told == waited
        assert f"{before}sampler.alpha: given -1.0" in capsys.readouterr().err


def test_a_launch_submits_no_grid(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        main(["-m", "experiment=demo", "hydra/launcher=slurm"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: hydra/launcher: given slurm in a launch of 2 processes; allowed: one process")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_sample_without_numbers_is_an_error_record(make_config, monkeypatch, capsys):
    """A digit whose embedding is no number: chains that meet it end, the others go on, none is drawn again."""
    from dflash_mcmc.model.hf import HFModel

    load = HFModel.load

    def spoilt(self, device):
        model = load(self, device)
        seven = int(model.encode("7")[0])
        model.decoder.get_input_embeddings().register_forward_hook(
            lambda module, given, output: output.masked_fill((given[0] == seven)[..., None], float("nan")))
        return model

    sound = execute(make_config(*QUICK, "dataset.limit=20", "sampler.num_blocks=1"))
    monkeypatch.setattr(HFModel, "load", spoilt)
    try:
        result = execute(make_config(*QUICK, "dataset.limit=20", "sampler.num_blocks=1", "seed=2"))
    finally:
        from dflash_mcmc.model import hf

        hf._load.cache_clear()
    records = records_of(result.folder).values()
    failed = [record for record in records if record["verdict"] == "not_drawn"]
    assert 0 < len(failed) < 20
    assert all("not numbers" in record["reason"] and not record["tokens"] for record in failed)
    assert result.summary["not_drawn"] == len(failed)
    assert f"{len(failed)} of 20 samples could not be drawn" in capsys.readouterr().err
    assert sound.summary["not_drawn"] == 0
    monkeypatch.undo()
    assert execute(make_config(*QUICK, "dataset.limit=20", "sampler.num_blocks=1", "seed=2")).num_new == 0


@pytest.mark.slow
def test_chains_of_a_problem_differ_and_seeds_differ(make_config, uninterrupted):
    pairs = [(uninterrupted[problem, 0]["tokens"], uninterrupted[problem, 1]["tokens"])
             for problem, chain in uninterrupted if chain == 0]
    assert sum(a != b for a, b in pairs) > len(pairs) / 2
    other = execute(make_config(*QUICK, "dataset.limit=8", "seed=1"))
    tokens = [record["tokens"] for record in records_of(other.folder).values()]
    assert sum(tokens[n] != pairs[n][0] for n in range(8)) > 4


@pytest.mark.slow
def test_torn_last_line_is_drawn_again(make_config, uninterrupted):
    result = execute(make_config(*QUICK, *WHOLE))
    path = result.folder / RECORDS
    whole = path.read_bytes()
    for cut in (1, 100):
        path.write_bytes(whole[:-cut])
        again = execute(make_config(*QUICK, *WHOLE))
        assert again.num_new == 1
        same(records_of(result.folder), uninterrupted)


@pytest.mark.slow
def test_what_others_leave_at_the_end_is_drawn(make_config, monkeypatch):
    """When everything else is done, two samples are still another process's; a look later it is gone."""
    config = make_config(*QUICK, "dataset.limit=4")
    claim, others, looks = RunStore.claim, {problem.id for problem in config.dataset.problems()[1:3]}, []

    def look(self):
        looks.append(len(self._store.records))
        assert len(looks) < 5
        others.clear()

    monkeypatch.setattr(RunStore, "claim", lambda self, key: key[0] not in others and claim(self, key))
    monkeypatch.setattr(loop._Loop, "_look", look)
    result = execute(config)
    assert (result.num_new, result.num_left, result.summary["num_samples"]) == (4, 0, 4)
    assert looks == [2]


def test_a_shard_leaves_what_others_draw_and_the_last_one_summarises(make_config, monkeypatch, tmp_path):
    """The first finds a sample claimed by another process, and goes; the other's death leaves it to the next."""
    config = make_config(*QUICK, "dataset.limit=3")
    claim = RunStore.claim
    monkeypatch.setenv("DFLASH_MCMC_SHARD", "1/2")
    with monkeypatch.context() as held:
        held.setattr(RunStore, "claim", lambda self, wanted: wanted[0] != held_by_another and claim(self, wanted))
        held_by_another = config.dataset.problems()[1].id
        result = execute(config)
    assert (result.num_new, result.num_left, result.summary) == (2, 1, {})
    assert not (result.folder / "summary.json").exists()
    again = execute(config)
    assert (again.num_new, again.num_left, again.summary["num_samples"]) == (1, 0, 3)
    assert (result.folder / "summary.json").exists()


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_the_rest_is_done_later(tmp_path, uninterrupted):
    with start(tmp_path, *WHOLE, "hardware.num_slots=4", until=2) as run:
        wait_for_records(tmp_path, 2, run)
        os.kill(run.pid, signal.SIGINT)
        try:
            _, told = run.communicate(timeout=processes.HANG)
        finally:
            run.kill()
    assert run.returncode == 130
    assert "run the same command again" in told
    assert "Traceback" not in told
    folder = folder_of(tmp_path)
    assert 2 <= len(records_of(folder)) < NUM_WHOLE
    same(finish(tmp_path), uninterrupted)


@pytest.mark.slow
def test_a_run_that_a_later_process_of_a_launch_drew_alone_is_described(make_config, monkeypatch):
    """In a sweep it can be ahead of the first, which then finds nothing to draw."""
    config = make_config(*QUICK, "dataset.limit=2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = execute(config).folder
    assert json.loads((folder / "run.json").read_text())["sessions"]
    monkeypatch.setenv("RANK", "0")
    assert execute(config).summary["num_samples"] == 2
    assert (folder / "config.yaml").is_file()


@pytest.mark.slow
def test_of_two_shards_that_end_together_one_summarises(make_config, monkeypatch):
    """The other's last record comes behind this one's last look at it, and ahead of its own end."""
    config = make_config(*QUICK, "dataset.limit=3")
    whole = execute(config)
    (whole.folder / "summary.json").unlink()
    lines = (whole.folder / RECORDS).read_bytes().splitlines(keepends=True)
    (whole.folder / RECORDS).write_bytes(lines[0])
    others = whole.folder / records_file(1)
    others.touch()
    monkeypatch.setenv("DFLASH_MCMC_SHARD", "0/2")
    monkeypatch.setattr(loop._Loop, "run", lambda self: others.open("ab").write(b"".join(lines[1:])))
    result = execute(config)
    assert (result.num_left, result.summary) == (0, whole.summary)
    assert (whole.folder / "summary.json").exists()


def test_a_run_that_others_draw_is_not_complete(tmp_path):
    assert loop.RunResult(tmp_path, {}, 0, 0, 0, 3).line() == (
        f"{tmp_path}: nothing drawn; 3 more are being drawn by other processes")
    assert loop.RunResult(tmp_path, {}, 16, 7, 0).line() == f"{tmp_path}: 16 new samples, 7 of them drawn by other processes"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ("condition=temp",), ("condition=ps", "sampler.num_steps=2"), ("condition=smc",)])
def test_the_cost_of_chains_of_a_problem_is_what_the_engine_evaluated_for_them(make_config, monkeypatch, overrides):
    """Four chains of two problems: the engine's meter counts what is read, and each drawn token has a forward of its own."""
    read, counted = [], Meter.count_reading

    def counting(meter, tokens, *others, **settings):
        read.append(tokens)
        return counted(meter, tokens, *others, **settings)

    monkeypatch.setattr(Meter, "count_reading", counting)
    config = make_config(*overrides, "num_chains=4", "aggregate=majority", "dataset.limit=2", "dataset.max_new_tokens=32")
    result = execute(config)
    summary, records = result.summary, list(map(json.loads, (result.folder / RECORDS).read_text().splitlines()))
    evaluated = sum(read) + sum(record["tokens_drawn"] - record.get("tokens_shared", 0) for record in records)
    assert summary["token_forwards"] == summary["majority/token_forwards"] == evaluated
    prompts = {record["problem"]: record["prompt_forwards"] for record in records}
    assert 8 * summary["mean_token_forwards"] - evaluated == 3 * sum(prompts.values())
