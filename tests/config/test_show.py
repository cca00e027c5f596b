"""`--cfg job` names the option of each group above the values."""

import dataclasses
import sys

import pytest
import yaml

from dflash_mcmc.__main__ import main
from dflash_mcmc.config import command as cli
from dflash_mcmc.config.compose import readable
from dflash_mcmc.config.schema import Config, Slurm, changed_launcher, expand
from dflash_mcmc.errors import UserError
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _prepared():
    cli.prepare()


@pytest.fixture
def shown(monkeypatch, capsys, tmp_path):
    """A function from a command line to what it prints."""
    def of(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["dflash_mcmc"])
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert not ended.value.code
        return capsys.readouterr().out

    return of


def test_options_stand_above_the_values(shown):
    text = shown("--cfg", "job", "condition=blend_ps", "draft=tiny")
    options = dict(line[1:].split() for line in text.splitlines()[1:] if line.startswith("#   "))
    assert text.startswith("# option of each group\n")
    assert {name: options[name] for name in ("condition", "blend", "sampler", "draft", "model")} == {
        "condition": "blend_ps", "blend": "layer", "sampler": "power_mh", "draft": "tiny", "model": "tiny"}
    assert yaml.safe_load(text)["blend"]["beta"] == 0.05


def test_a_part_of_the_configuration_has_no_options(shown):
    assert "option of each group" not in shown("--cfg", "job", "--package", "sampler", "condition=ps")


@pytest.mark.parametrize("missing", [
    ("model=hf", "model.path=/not/here"), ("experiment=real",), ("experiment=phase0",),
    ("dataset=jsonl", "dataset.path=/no.jsonl"), ("experiment=guided_power_sampling", "condition=draft_blend_ps")])
def test_nothing_that_a_run_would_read_has_to_be_there(shown, missing):
    text = shown("--cfg", "job", *missing)
    named = [word.partition("=")[2] for word in missing if ".path=" in word]
    assert all(name in text for name in named)
    assert set(yaml.safe_load(text)) >= {"model", "dataset", "sampler"}


# Texts with braces, as a shell passes them on: one text for a field, and unchanged values everywhere else.

TEXTS = ["{question} Answer briefly.", "{question}", r"Put it in \boxed{}: {question}", '{question} "quoted" \\',
         "a, {question}", "{a: 1} {question}", "{{ x }} {question}"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_with_braces_is_taken_as_it_is_typed(text):
    [job] = cli.check_command([f"dataset.prompt={text}", "tracker=none"]).jobs
    assert job.config.dataset.prompt == text
    [again] = cli.check_command(list(job.overrides)).jobs  # a grid and a search compose the texts of a job once more
    assert again.config.dataset.prompt == text


def test_values_that_can_be_read_are_unchanged():
    for text in ("sampler.alpha=1,2", "dataset.ids=[a,b]", "assumed={prompt_length: 3}", 'dataset.prompt="{question}"',
                 "model={x", "hydra.sweeper.params={a", "sampler.alpha=2)", "--cfg"):
        assert readable(text) == text


def test_quoted_values_are_swept():
    jobs = cli.check_command(["-m", 'dataset.prompt="{question} A","{question} B"', "tracker=none"]).jobs
    assert [job.config.dataset.prompt for job in jobs] == ["{question} A", "{question} B"]


def test_texts_of_a_sweep_need_quotes():
    with refused("dataset.prompt: given {question} A,{question} B2; allowed: quotes around each value of a sweep, "
                 """dataset.prompt='"{question} A","{question} B2"', or around one text with commas, """
                 """dataset.prompt='"{question} A,{question} B2"'"""):
        readable("dataset.prompt={question} A,{question} B2")
    assert readable("dataset.prompt={question} Think, then answer.") == 'dataset.prompt="{question} Think, then answer."'


# The fields of hydra/launcher=slurm: typed, bounded, and named in one line where they are wrong.

SLURM = ("-m", "hydra/launcher=slurm")


def launcher_of(*arguments: str) -> Slurm | None:
    return cli.check_command(list(arguments)).launcher


MISTAKES = {
    "unknown field": (["hydra.launcher.shrads=2"], "hydra.launcher.shrads", "did you mean 'shards'"),
    "text for a number": (["hydra.launcher.shards=x"], "hydra.launcher.shards: given 'x'", "a whole number >= 1"),
    "no shards": (["hydra.launcher.shards=0"], "hydra.launcher.shards: given 0", "a whole number >= 1"),
    "gpus negative": (["hydra.launcher.gpus=-1"], "hydra.launcher.gpus: given -1", ">= 0 and <= 64"),
    "no memory": (["hydra.launcher.memory_gb=0"], "hydra.launcher.memory_gb", "a number > 0 or null"),
    "no time": (["hydra.launcher.minutes=0"], "hydra.launcher.minutes", "a whole number >= 1"),
    "empty partition": (["hydra.launcher.partition=''"], "hydra.launcher.partition", "a text of one line"),
    "setup that is no list": (["hydra.launcher.setup=module"], "hydra.launcher.setup", "a list"),
    "grace longer than the job": (["hydra.launcher.minutes=2"],
                                  "hydra.launcher.grace_seconds: given 120", "60 with minutes=2"),
    "processes without GPUs": (["hydra.launcher.gpus=2", "hydra.launcher.processes=4"], "hydra.launcher.processes: given 4",
                               "2 with gpus=2"),
    "field that is swept": (["hydra.launcher.shards=1,2"], "hydra.launcher.shards: given several values", "one, for all jobs"),
    "launcher that is swept": (["hydra/launcher=slurm,basic"], "hydra/launcher", "one"),
    "launcher by what is swept": (["hardware=local,slurm_cpu"], "hydra/launcher", "one launcher for all"),
    "field of another launcher": (["hydra/launcher=basic", "hydra.launcher.shards=2"], "hydra.launcher.shards",
                                  "hydra/launcher=slurm"),
    "hardware with another launcher": (["hydra/launcher=basic", "hardware=slurm_cpu"],
                                       "hydra.launcher", "hydra/launcher=slurm"),
}


@pytest.mark.parametrize(("arguments", "field", "allowed"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_line(arguments, field, allowed):
    with refused(field, allowed):
        launcher_of(*(SLURM if arguments[0].startswith("hydra.") else SLURM[:1]), *arguments)


def test_there_is_none_unless_it_is_chosen():
    assert launcher_of("condition=ps") is None
    assert launcher_of("-m", "condition=ps,temp") is None
    assert launcher_of(*SLURM, "condition=ps,temp", "hydra.launcher.shards=3").shards == 3


def test_hardware_chooses_it_and_the_command_line_wins():
    launcher = launcher_of("hardware=slurm_gpu", "hydra.launcher.minutes=90")
    assert (launcher.gpus, launcher.minutes, launcher.num_processes) == (1, 90, 1)
    assert launcher_of("-m", "hardware=slurm_gpus", "seed=1,2").num_processes == 8
    command = cli.check_command(["hardware=slurm_cpu"])
    assert command.launcher.gpus == 0
    assert command.jobs[0].config.hardware.device == "cpu"


def test_a_group_of_gpus_is_one_process():
    launcher = launcher_of("hardware=slurm_gpus")
    assert launcher.with_groups(1) == launcher
    assert [launcher.with_groups(number).num_processes for number in (2, 3, 8)] == [4, 2, 1]
    assert changed_launcher(launcher, ["processes=2"]).with_groups(3).num_processes == 2
    on_cpus = changed_launcher(launcher, ["gpus=0", "processes=2"])
    assert on_cpus.with_groups(3) == on_cpus
    with refused("hydra.launcher.gpus: given 8", "at least 9"):
        launcher.with_groups(9)
    with refused("hydra.launcher.processes: given 3", "at most 2 with gpus=8 and 4 GPUs for each"):
        changed_launcher(launcher, ["processes=3"]).with_groups(4)


@pytest.mark.slow
def test_a_sites_values_come_from_conf_local_and_disturb_no_other_launcher(tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "slurm.yaml").write_text("partition: ours\nsetup: [module load cuda]\n")
    launcher = launcher_of("--config-dir", str(tmp_path), "hardware=slurm_gpu")
    assert (launcher.partition, launcher.setup, launcher.gpus) == ("ours", ["module load cuda"], 1)
    assert launcher_of("--config-dir", str(tmp_path), "-m", "seed=1,2") is None
    (tmp_path / "local" / "slurm.yaml").write_text("partiton: ours\n")
    with pytest.raises(UserError, match=r"partiton"):
        launcher_of("--config-dir", str(tmp_path), "hardware=slurm_gpu")


def test_short_names_are_not_those_of_anything_else():
    names = {field.name for field in dataclasses.fields(Slurm)}
    assert not names & set(Config.__dataclass_fields__)
    assert not names & {entry.name for entry in cli.config_folder().iterdir() if entry.is_dir()}
    assert expand(["condition=greedy,ps", "shards=8", "setup=[module load x]", "shards", "hydra.launcher.cpus=2"]) == [
        "condition=greedy,ps", "hydra.launcher.shards=8", "hydra.launcher.setup=[module load x]", "shards",
        "hydra.launcher.cpus=2"]


def test_a_grids_fields_can_be_changed_later():
    launcher = launcher_of(*SLURM)
    later = changed_launcher(launcher, ["minutes=240", "hydra.launcher.partition=long", "memory_gb=64"])
    assert (later.minutes, later.partition, later.memory_gb, later.cpus) == (240, "long", 64.0, launcher.cpus)
    assert launcher.minutes == 60
    for text, allowed in (("minutes=x", "a whole number >= 1"), ("minutes=1", "at most half"), ("hours=2", "minutes")):
        with pytest.raises(UserError, match=allowed):
            changed_launcher(launcher, [text])
