"""lm_eval and inspect_ai ask the server, by the commands of their page; a run opens as a log of inspect_ai."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_mcmc as dm
from dflash_mcmc.config.schema import PACKAGE
from tests import pages
from tests.conftest import ROOT
from tests.serving import Served

pytest.importorskip("inspect_ai", reason="inspect_ai is not installed: make harness")
pytest.importorskip("lm_eval", reason="lm_eval is not installed: make harness")
pytestmark = pytest.mark.harness

from inspect_ai.log import EvalLog, read_eval_log  # noqa: E402

PAGE = ROOT / "docs/howto/evaluation-harnesses.md"
TINY = str(PACKAGE / "assets/tiny")


@pytest.fixture(autouse=True)
def guard_of_a_test() -> None:
    """Replaces the guard of tests/leaks.py: inspect_ai sets variables, and servers keep their threads."""


@pytest.fixture(autouse=True, scope="module")
def guard_of_a_module() -> None:
    """As `guard_of_a_test`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the page's files and problems of the embedded model."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "rows.jsonl").write_text("".join((PACKAGE / "assets/arith.jsonl").open().readlines()[:6]))
    for block in (*pages.blocks(PAGE, "yaml"), *pages.blocks(PAGE, "python")):
        place, _, text = block.partition("\n")
        path = folder / place.removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The servers of the page run on free ports: the address of each by that of the page."""
    with contextlib.ExitStack() as stack:
        found = {}
        for line in pages.marked(pages.commands(PAGE), pages.NEEDS_LM_EVAL):
            if "dflash_mcmc.serve" in line:
                overrides = line.replace("FOLDER", TINY).split()[3:]
                (port,) = (text.removeprefix("serve.port=") for text in overrides if text.startswith("serve.port="))
                started = stack.enter_context(Served([*overrides, "serve.port=0"]))
                found[f"127.0.0.1:{port}"] = f"127.0.0.1:{started.port}"
        yield found


def shown(command: str, folder: Path, servers: dict[str, str]) -> str:
    """What a command of the page prints."""
    for place, own in {"FOLDER": TINY, **servers}.items():
        command = command.replace(place, own)
    done = pages.shell(command, folder, HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, (command, done.stderr[-2000:], done.stdout[-2000:])
    return done.stdout


def scores(folder: Path) -> list[float]:
    """The log likelihoods of a log of lm_eval, in order."""
    (log,) = folder.rglob("samples_*.jsonl")
    return [float(answer[0][0]) for line in log.open() for answer in json.loads(line)["resps"]]


def test_lm_eval_asks_the_server(folder, servers):
    lines = [line for line in pages.marked(pages.commands(PAGE), pages.NEEDS_LM_EVAL) if "dflash_mcmc.serve" not in line]
    assert len(lines) == 5
    printed = [shown(line, folder, servers) for line in lines]
    assert all("|arith_" in text for text in printed)
    assert scores(folder / "scores") == pytest.approx(scores(folder / "scores-hf"), abs=1e-4)


def test_greedy_answers_are_those_of_hf(folder, servers):
    """Of the same task and prompts, chat by the server and chat by lm_eval."""
    asked, own = (line for line in pages.marked(pages.commands(PAGE), pages.NEEDS_LM_EVAL)
                  if "8002/v1/chat" in line or ("--model hf" in line and "arith_local" in line))
    texts = []
    for name, line in (("asked", asked.partition(" --system")[0]), ("own", own)):
        shown(f"{line} --log_samples --output_path {name}", folder, servers)
        (log,) = (folder / name).rglob("samples_*.jsonl")
        texts.append([json.loads(line)["resps"] for line in log.open()][:3])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def logs(folder: Path) -> list[EvalLog]:
    return [read_eval_log(str(path)) for path in sorted(folder.glob("*.eval"))]


def test_inspect_asks_the_server(folder, servers):
    lines = pages.marked(pages.commands(PAGE), pages.NEEDS_INSPECT)
    assert len(lines) == 5
    for line in lines[:2]:
        shown(line, folder, servers)
    found = logs(folder / "logs")
    assert max(log.results.scores[0].metrics["accuracy"].value for log in found) > 0.5
    assert [sample.epoch for log in found if log.eval.config.epochs == 2 for sample in log.samples].count(2) == 3
    for line in lines[2:]:
        shown(line, folder, servers)
    assert json.loads((folder / "shown/logs/listing.json").read_text())


def test_a_run_opens_as_a_log(tmp_path, monkeypatch, capsys):
    from dflash_mcmc.export import main

    monkeypatch.chdir(tmp_path)
    run = dm.run("condition=temp", "sampler.temperature=1.5", "dataset.limit=6", "num_chains=2", "tracker=none",
                 "dataset.max_new_tokens=24")
    records = {(record["problem"], record["chain"]): record for record in dm.read(run).to_dict("records")}
    for form in ("eval", "json"):
        with pytest.raises(SystemExit) as ended:
            main([str(run.folder), "--to", "inspect", "--format", form])
        assert ended.value.code == 0
        (path,) = (tmp_path / "logs").glob(f"*.{form}")
        log = read_eval_log(str(path))
        assert (log.status, log.eval.task, log.eval.model) == ("success", "arith", "dflash/tiny")
        assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(run.summary["accuracy"])
        assert {(sample.id, sample.epoch - 1) for sample in log.samples} == set(records)
        for sample in log.samples:
            record = records[sample.id, sample.epoch - 1]
            assert sample.output.completion == record["text"]
            assert sample.scores["math"].value == {"correct": "C", "wrong": "I"}.get(record["verdict"], "N")
            assert sample.metadata["log_p"] == pytest.approx(record["log_p"])
            assert (sample.target, sample.messages[-1].text) == (record["gold"], record["text"])
        assert log.stats.model_usage["dflash/tiny"].output_tokens == sum(record["num_tokens"] for record in records.values())
    assert sorted(path.suffix for path in (tmp_path / "logs").iterdir()) == [".eval", ".json"]
