"""`model=`, `draft=` and `dataset=` take a folder, a file or a hub name, as the fields in full do."""

import shutil
import sys

import pytest
import yaml

import dflash_mcmc as dm
from dflash_mcmc.__main__ import main
from dflash_mcmc.config.command import check_command, prepare
from dflash_mcmc.config.identity import identity_of, point_labels, run_folder
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.runner.plan import checked
from tests.refusals import refused

ASSETS = PACKAGE / "assets"


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A folder with a model, drafts and data of the user, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny_draft", "tiny_dspark", "tiny_dflash2"):
        shutil.copytree(ASSETS / name, tmp_path / f"my_{name}")
    (tmp_path / "my.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "my.csv").write_text("question,answer\n1+1?,2\n")
    return tmp_path


def jobs(*arguments: str):
    return check_command(["tracker=none", *arguments]).jobs


@pytest.mark.parametrize(("short", "long"), [
    (["model=my_tiny"], ["model=hf", "model.path=my_tiny"]),
    (["model=./my_tiny"], ["model=hf", "model.path=./my_tiny"]),
    (["model=my_tiny", "model.dtype=float32"], ["model=hf", "model.path=my_tiny", "model.dtype=float32"]),
    (["draft=my_tiny_draft"], ["draft=dflash", "draft.path=my_tiny_draft"]),
    (["draft=my_tiny_dspark/"], ["draft=dspark", "draft.path=my_tiny_dspark/"]),
    (["draft=my_tiny_dflash2"], ["draft=dflash2", "draft.path=my_tiny_dflash2"]),
    (["dataset=my.jsonl"], ["dataset=jsonl", "dataset.path=my.jsonl"]),
    (["dataset=./my.csv"], ["dataset=jsonl", "dataset.path=./my.csv"]),
    (["experiment=demo", "dataset=my.jsonl"], ["experiment=demo", "dataset=jsonl", "dataset.path=my.jsonl"]),
])
def test_a_path_is_what_the_fields_in_full_are(short, long):
    decoder = ["decoder=speculative_match"] if short[0].startswith("draft=") else []
    (one,), (other,) = jobs(*decoder, *short), jobs(*decoder, *long)
    assert one.config == other.config
    assert identity_of(one.config) == identity_of(other.config)
    assert one.overrides == other.overrides
    assert one.choices == other.choices


@pytest.mark.slow
def test_a_path_and_an_option_are_swept_together_and_labelled_by_their_names(own):
    swept = jobs("-m", f"model={own}/my_tiny,my_tiny", "condition=ps", "dataset=my.jsonl,arith", "dataset.limit=1")
    in_full = jobs("-m", "model=hf", f"model.path={own}/my_tiny,my_tiny", "condition=ps", "dataset=my.jsonl,arith",
                   "dataset.limit=1")
    assert point_labels(swept) == point_labels(in_full)
    assert [identity_of(job.config) for job in swept] == [identity_of(job.config) for job in in_full]
    mixed = jobs("-m", "model=tiny,my_tiny", "decoder=speculative_match", "draft=tiny,my_tiny_dspark")
    assert point_labels(mixed)[1::2] == [
        "dspark_power_mh_speculative_match draft=my_tiny_dspark model=tiny",
        "dspark_power_mh_speculative_match draft=my_tiny_dspark model=hf path=my_tiny"]
    assert len({str(identity_of(job.config)) for job in mixed}) == 2, "both models have one content"


def test_cfg_shows_the_fields_in_full(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dflash_mcmc"])
    with pytest.raises(SystemExit) as ended:
        main(["--cfg", "job", "model=Qwen/Qwen3-4B", "dataset=openai/gsm8k", "draft=z-lab/Qwen3-4B-DFlash-b16"])
    assert not ended.value.code
    shown = yaml.safe_load(capsys.readouterr().out)
    assert [shown[group]["path"] for group in ("model", "dataset", "draft")] == [
        "Qwen/Qwen3-4B", "openai/gsm8k", "z-lab/Qwen3-4B-DFlash-b16"]
    assert "split" in shown["dataset"]


def test_python_takes_paths_too(own):
    assert dm.component("model", "my_tiny") == dm.component("model", "hf", path="my_tiny")
    assert dm.component("draft", f"{own}/my_tiny_dspark", dtype="float32").path == f"{own}/my_tiny_dspark"


@pytest.mark.parametrize(("given", "said"), [
    (["model=Qwen3-4B"], "model: unknown option 'Qwen3-4B' (did you mean 'qwen3_4b'?); allowed: hf, "),
    (["model=Qwen3-4B"], "tiny; or model=PATH, a folder, or a hub name such as Qwen/Qwen3-4B"),
    (["dataset=gsm8"], "dataset: unknown option 'gsm8' (did you mean 'gsm8k'?); allowed: "),
    (["dataset=GSM8K"], "dataset: unknown option 'GSM8K' (did you mean 'gsm8k'?); allowed: "),
    (["num_return_sequences=4"], "num_return_sequences: unknown field (did you mean num_chains=4?); allowed: "),
    (["dataset=gsm8"], "; or dataset=PATH, a file (JSON Lines or CSV), or a hub name such as openai/gsm8k"),
    (["draft=./nothing", "decoder=speculative_match"], "draft.path: given './nothing'"),
    (["dataset=missing.jsonl"], "dataset.path: given 'missing.jsonl'; allowed: a JSON Lines or CSV file that exists"),
    (["dataset=/nothing/data"], "dataset.path: given '/nothing/data'; allowed: a folder that exists"),
    (["sampler=my/own"], "sampler: unknown option 'my/own'; allowed: best_of_n, "),
])
def test_what_is_not_there_is_one_line(given, said):
    prepare()
    with refused(said):
        checked(["tracker=none", *given])


def test_a_tilde_in_the_outputs_is_the_home_for_every_program(monkeypatch, tmp_path):
    """A grid's jobs, a training and an audit take the folder from the same object."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (job,) = jobs("paths.outputs='~/runs'")
    assert job.config.paths.outputs == str(tmp_path / "home/runs")
    assert run_folder(job.config, "0").is_relative_to(tmp_path / "home")
