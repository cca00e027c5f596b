"""What a run tells its tracker: every record and the summary, once, whatever ended the starts between; and a readable name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from statsmodels.stats.proportion import proportion_confint

from dflash_mcmc.config import command as cli
from dflash_mcmc.config.schema import PACKAGE, Job
from dflash_mcmc.runner.loop import RunningAccuracy, readable_name, tags
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.tracker import Guarded
from dflash_mcmc.tracker.trackio import TrackioTracker
from tests import processes
from tests.conftest import ROOT
from tests.processes import HANG
from tests.runs import execute, shared
from tests.tracker import lines
from tests.tracker.lines import Lines

GREEDY = ("experiment=demo", "condition=greedy", "dataset.limit=3")


@pytest.fixture(autouse=True)
def _lines(monkeypatch):
    lines.use(monkeypatch.setattr)


def told(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in told(folder) if "step" in line]


def summaries(folder: Path) -> list[dict]:
    return [line["summary"] for line in told(folder) if "summary" in line]


@pytest.fixture
def no_model(monkeypatch):
    """A function behind which loading a model fails the test."""
    return lambda: monkeypatch.setattr("dflash_mcmc.model.hf.HFModel.load", lambda *_: pytest.fail("loaded a model"))


def test_a_tracker_that_is_new_to_a_run_is_told_all_of_it(make_config, no_model):
    folder = execute(make_config(*GREEDY)).folder
    assert "tracked" not in (folder / "run.json").read_text()
    no_model()
    result = execute(make_config(*GREEDY, "tracker=trackio"))
    assert steps(folder) == [1, 2, 3]
    assert summaries(folder) == [result.summary]
    for end in ("", "_low", "_high"):
        assert told(folder)[2][f"running/accuracy{end}"] == pytest.approx(result.summary[f"accuracy{end}"])


@pytest.mark.slow
def test_it_is_told_before_what_is_drawn_then(make_config):
    folder = execute(make_config(*GREEDY)).folder
    for _ in range(2):
        execute(make_config(*GREEDY, "tracker=trackio", "dataset.limit=5"))
        assert steps(folder) == [1, 2, 3, 4, 5]
        assert [summary["num_samples"] for summary in summaries(folder)] == [5]


@pytest.mark.slow
def test_a_summary_with_another_vote_is_told(make_config, no_model):
    draws = ("experiment=demo", "condition=temp", "num_chains=3", "dataset.limit=3", "tracker=trackio")
    folder = execute(make_config(*draws)).folder
    no_model()
    for _ in range(2):
        execute(make_config(*draws, "aggregate=majority"))
    assert ["majority/accuracy" in summary for summary in summaries(folder)] == [False, True]


@pytest.mark.parametrize("fails", ["log", "summary", "publish", "finish"])
def test_what_a_tracker_failed_to_take_it_is_told_again(make_config, monkeypatch, fails, no_model, capsys):
    def fail(self, *given):
        raise OSError("quota")

    with monkeypatch.context() as broken:
        broken.setattr(Lines, fails, fail)
        result = execute(make_config(*GREEDY, "tracker=trackio"))
    assert result.summary["num_samples"] == 3
    assert "quota" in capsys.readouterr().err
    no_model()
    execute(make_config(*GREEDY, "tracker=trackio"))
    assert steps(result.folder) == [1, 2, 3]
    assert summaries(result.folder)[-1] == result.summary
    count = len(told(result.folder))
    execute(make_config(*GREEDY, "tracker=trackio"))
    assert len(told(result.folder)) == count


class Failing:
    """A tracker that fails at the call named `at`."""

    def __init__(self, at: str):
        self.at, self.calls = at, []

    def __getattr__(self, name: str):
        def call(*_):
            self.calls.append(name)
            if name == self.at:
                raise OSError("no space\nleft")
            return self

        return call


def test_a_failing_tracker_is_reported_once_and_not_used_again(capsys):
    for at in ("start", "log", "summary", "publish", "finish"):
        tracker = Failing(at)
        guarded = Guarded(tracker, None)
        guarded.tell(lambda run: run.log({}, 1))
        guarded.tell(lambda run: run.log({}, 2))
        guarded.tell(lambda run: run.summary({}, []))
        guarded.tell(lambda run: run.publish(None, {}, []))
        assert guarded.works == (at == "finish")
        guarded.tell(lambda run: run.finish(0))
        assert not guarded.works
        assert tracker.calls.index(at) == len(tracker.calls) - 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "no space left" in error


HOLDS = """
import pathlib, sys
from dflash_mcmc.store.folder import RunStore
with RunStore.open(pathlib.Path(sys.argv[1])) as store:
    print(store.lead(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_the_end_of_another_process_that_leads_is_not_waited_for(make_config, monkeypatch, capsys):
    """It may have been asked for far more of the run. What the tracker lacks then is told by the next start."""
    monkeypatch.setattr("dflash_mcmc.runner.loop._LEAVE_SECONDS", 0.1)
    folder = execute(make_config(*GREEDY)).folder
    with subprocess.Popen([sys.executable, "-c", HOLDS, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          cwd=ROOT) as other:
        assert other.stdout.readline() == b"True\n"
        (folder / "summary.json").unlink()
        result = execute(make_config(*GREEDY, "tracker=trackio"))
        other.stdin.close()
    assert json.loads((folder / "summary.json").read_text()) == result.summary
    assert not (folder / "metrics.jsonl").exists()
    assert "another process is still working on this run and logs it to the tracker" in capsys.readouterr().err
    execute(make_config(*GREEDY, "tracker=trackio"))
    assert summaries(folder) == [result.summary]


def test_the_tracker_hears_how_a_run_ended(make_config, monkeypatch):
    codes = []
    monkeypatch.setattr(Lines, "finish", lambda self, exit_code: codes.append(exit_code))
    execute(make_config(*GREEDY, "tracker=trackio"))
    monkeypatch.setattr(RunStore, "append", lambda self, record: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        execute(make_config(*GREEDY, "tracker=trackio", "dataset.limit=4"))
    assert codes == [0, 1]


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    for rank in processes.start_ranks(2, shared("dataset.limit=6", "tracker=trackio"), tmp_path):
        _, errors = rank.communicate(processes.HANG)
        assert rank.returncode == 0, errors[-3000:]
    (folder,) = (tmp_path / "outputs/demo").iterdir()
    assert (folder / "records.1.jsonl").read_text()
    assert steps(folder) == list(range(1, 7))
    (summary,) = summaries(folder)
    assert summary["num_samples"] == 6
    assert told(folder)[5]["running/accuracy"] == pytest.approx(summary["accuracy"])


def test_running_accuracy_counts_problems():
    running = RunningAccuracy()
    assert running.metrics() == {}
    running.add({"rank": 3})  # of a probe
    assert running.metrics() == {}
    verdicts = ["correct", "wrong", "correct", "no_answer", "correct"]
    for number, verdict in enumerate(verdicts):
        running.add({"problem": str(number), "verdict": verdict})
    low, high = proportion_confint(3, 5, method="wilson")
    once = running.metrics()
    assert once == pytest.approx({"running/accuracy": 0.6, "running/accuracy_low": low, "running/accuracy_high": high})
    for number, verdict in enumerate(verdicts):  # the same again: chains that agree say no more of other problems
        running.add({"problem": str(number), "verdict": verdict})
    assert running.metrics() == pytest.approx(once)


@pytest.fixture
def named():
    """(name, tags) of the job of a command line."""
    def of(*overrides: str) -> tuple[str, tuple[str, ...]]:
        (job,) = cli.check_command(list(overrides)).jobs
        return readable_name(job), tags(job)

    return of


@pytest.mark.parametrize(("overrides", "name"), [
    (("condition=ps",), "ps"),
    (("condition=ps", "sampler.alpha=2"), "ps alpha=2"),
    (("condition=ps", "++sampler.alpha=4", "seed=1"), "ps alpha=4 seed=1"),  # as it stands there, also where it is the default
    (("experiment=demo", "condition=blend_ps", "blend.beta=0.1", "dataset.limit=3", "hardware.num_slots=4", "num_chains=2"),
     "blend_ps beta=0.1"),  # what changes no output tells no runs apart
    (("sampler=temperature", "sampler.temperature=0.7", "model=tiny"), "temperature model=tiny temperature=0.7"),
    (("condition=ps", "decoder=speculative_match", "draft=tiny"), "ps decoder=speculative_match draft=tiny"),
    (("sampler=greedy", "decoder=speculative_match", "draft=tiny"), "dflash_greedy_speculative_match draft=tiny"),
    (("sampler=greedy", f"dataset.prompt='{'x' * 60} {{question}}'"), "greedy prompt=#2f02269f"),
    (("condition=ps", "model=hf", f"model.path={PACKAGE}/assets/tiny", "dataset.max_new_tokens=64"),
     "ps max_new_tokens=64 model=tiny"),  # a folder by its name
    (("probe=rejection_sampling", "seed=2"), "rejection_sampling seed=2"),
])
def test_names_say_what_the_command_line_set(named, overrides, name):
    assert named(*overrides)[0] == name


def test_tags_are_the_words_of_the_command_line(named, make_config):
    assert set(named("condition=blend_ps")[1]) == {"model=tiny", "blend=layer", "sampler=power_mh", "dataset=arith"}
    assert set(named("probe=rejection_sampling")[1]) <= {"probe=rejection_sampling", "model=tiny", "dataset=arith"}


def test_without_a_command_line_the_name_is_the_label(make_config):
    config = make_config("condition=ps", "sampler.alpha=2")
    assert readable_name(Job(config)) == config.label() == "ps"


@pytest.mark.slow
def test_a_run_of_a_sweep_of_the_tracker_is_told_all_of_what_another_was_told(make_config, monkeypatch, no_model):
    """`wandb agent` gives each of its points a run of its own, also one that was drawn before."""
    from dflash_mcmc.tracker.wandb import WandbTracker

    folder = execute(make_config(*GREEDY, "tracker=trackio")).folder
    no_model()
    monkeypatch.setattr(TrackioTracker, "key", WandbTracker.key, raising=False)
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-sweep")
    execute(make_config(*GREEDY, "tracker=trackio"))
    assert steps(folder) == [1, 2, 3, 1, 2, 3]
    assert len(summaries(folder)) == 2
    execute(make_config(*GREEDY, "tracker=trackio"))
    assert len(summaries(folder)) == 2


# Secrets of the environment are in no file that a run, a sweep, a tracker or a report writes, and in no printed text.

KEY = "c0ffee" * 6 + "5eed"
SECRETS = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_" + "Planted" * 5, "OPENAI_API_KEY": "sk-planted-0123456789abcdef",
           "DFLASH_TEST_JUDGE_KEY": "judge-planted-fedcba987654"}


def found_in(folder) -> list[str]:
    """The files below a folder that have a secret, with its name. Compressed files are not opened."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    assert files
    return [f"{path.relative_to(folder)}: {name}" for path in files for name, secret in SECRETS.items()
            if secret.encode() in path.read_bytes()]


def run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module in a folder, which is its home too, with the secrets in its environment."""
    places = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "CACHE", "CONFIG")}
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=folder, capture_output=True, text=True, check=False,
                          timeout=HANG, env={**os.environ, **SECRETS, **places, "HOME": str(folder / "home")})


def test_the_search_finds_a_secret(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log").write_text(f"x {KEY} y")
    assert found_in(tmp_path) == ["a/log: WANDB_API_KEY"]


def test_the_files_of_a_run_have_no_secret(make_config, tmp_path, monkeypatch, capfd):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    execute(make_config("sampler=greedy", "dataset.limit=1", "dataset.max_new_tokens=8"))
    (tmp_path / "printed").write_text("".join(capfd.readouterr()))
    assert found_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [["tracker=wandb"], ["tracker=none", "-m", "seed=0,1"], [
    "tracker=none", "grader=judge", "grader.url=http://127.0.0.1:9", "grader.model=none",
    "grader.api_key_env=DFLASH_TEST_JUDGE_KEY"]],
    ids=["wandb", "sweep", "judge"])
def test_nothing_that_is_written_has_a_secret(tmp_path, options):
    done = run(tmp_path, "dflash_mcmc", "sampler=greedy", "dataset.limit=1", "dataset.max_new_tokens=8", *options)
    printed = done.stdout + done.stderr
    judged = "grader=judge" in options
    assert judged or done.returncode == 0, done.stderr
    assert judged or list(tmp_path.glob("outputs/**/records.jsonl"))
    if not judged:
        report = run(tmp_path, "dflash_mcmc.report", "outputs")
        assert report.returncode == 0, report.stderr
        printed += report.stdout + report.stderr
    (tmp_path / "printed").write_text(printed)
    assert found_in(tmp_path) == []
