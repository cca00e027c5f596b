"""Every job of a command line is checked before weights are loaded, and with the numbers of the loaded models."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_mcmc.__main__ import main
from dflash_mcmc.chains import build
from dflash_mcmc.config.identity import identity_hash, run_folder
from dflash_mcmc.config.schema import Job
from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching import plan as memory
from dflash_mcmc.errors import note
from dflash_mcmc.runner import plan
from dflash_mcmc.store.files import to_line
from tests.report.folders import record

ROOT = Path(__file__).parents[2]
SMALL = ("dataset.limit=2", "tracker=none")


@pytest.fixture(autouse=True)
def _nothing_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("model.hf._load", "draft._network", "store.folder.RunStore.open", "grid.folder.Grid.create"):
        monkeypatch.setattr(f"dflash_mcmc.{place}", lambda *_, **__: pytest.fail("before the checks are done"))


def refused(capsys, *arguments: str) -> str:
    """The error of a command line that a check refuses."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *SMALL])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path.cwd().glob("outputs*"))
    return error


@pytest.fixture
def other_target(make_config, tmp_path) -> str:
    """A folder with the embedded tokenizer and the config.json of a larger model, without weights."""
    folder = tmp_path / "other"
    shutil.copytree(make_config().model.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 256, "max_position_embeddings": 700}))
    return str(folder)


@pytest.mark.parametrize("more", [(), ("dry_run=true",), ("hydra/launcher=slurm",)])
def test_draft_of_another_target_is_refused_before_the_first_point(capsys, other_target, more):
    error = refused(capsys, "-m", "model=hf", f"model.path={other_target}", "condition=greedy,draft_blend_ps", "draft=tiny",
                    *more)
    assert error == ("error: draft.path: the draft has hidden size 128; allowed: 256, the target's (the point "
                     "condition=draft_blend_ps)")


def test_prompt_and_answer_have_to_fit_at_every_point(capsys, other_target):
    swept = ("-m", "model=hf", f"model.path={other_target}", "condition=greedy", "dataset.max_new_tokens=128,690")
    error = refused(capsys, *swept)
    assert "dataset.max_new_tokens: given 690; allowed: at most " in error
    assert "of the model's 700 positions" in error
    assert error.endswith("(the point dataset.max_new_tokens=690)")


def test_solutions_are_measured_where_a_probe_reads_them(capsys, other_target):
    config = Path(other_target) / "config.json"
    config.write_text(config.read_text().replace("700", "64"))
    probe = ("model=hf", f"model.path={other_target}", "probe=layer_rank")
    assert "the solution of problem arith-" in refused(capsys, *probe)
    said = refused(capsys, *probe, "probe.answers=greedy")
    assert "dataset.max_new_tokens: given 128, the default of dataset=arith; allowed: " in said
    assert "dataset.max_new_tokens: given 120; allowed: " in refused(
        capsys, *probe, "probe.answers=greedy", "dataset.max_new_tokens=120")


def test_a_file_and_a_model_that_does_not_hold_its_default_length_say_where_the_length_comes_from(capsys, tmp_path):
    (tmp_path / "mine.csv").write_text("question,answer\nHow many are 2 and 3?,5\n")
    said = refused(capsys, f"dataset={tmp_path / 'mine.csv'}", "condition=greedy")
    assert said.startswith("error: dataset.max_new_tokens: given 1024, the default of dataset=jsonl; allowed: at most ")


def test_gold_answers_that_the_grader_cannot_read_are_refused_in_a_dry_run_too(capsys, tmp_path):
    swept = ("-m", "condition=greedy,temp", "dataset=arith", "grader=code", "grader.allow_execution=true", "dry_run=true")
    error = refused(capsys, *swept)
    assert error.startswith("error: grader=code: given the gold answer '")
    assert error.endswith("(the point condition=greedy)")
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "87 * 3?", "answer": "87*3=<<87*3=261>>261\n#### 261"}))
    error = refused(capsys, f"dataset={tmp_path / 'own.jsonl'}", "condition=greedy", "dry_run=true")
    assert r"answer: given '87*3=<<87*3=261>>261\n#### 261'; allowed: the final answer alone" in error
    assert "dataset=gsm8k dataset.path=FILE dataset.check_rows=false" in error


def test_a_device_that_is_not_here_is_refused_before_any_point_is_drawn(capsys):
    error = refused(capsys, "-m", "condition=greedy,ps", "dataset.limit=1", "hardware.device=cuda:99")
    assert error.startswith("error: hardware.device: given 'cuda:99'; allowed: cpu, ")
    assert error.endswith("(the point condition=greedy)")


def test_memory_that_does_not_suffice_is_refused(capsys, monkeypatch):
    few = ("condition=ps", "num_chains=99")
    error = refused(capsys, "-m", *few, "hardware.memory_gb=100,0.00001")
    assert "hardware.memory_gb: given 1e-05; allowed: at least 0.0" in error
    assert error.endswith("(the point hardware.memory_gb=1e-05)")
    monkeypatch.setattr(memory, "free_bytes", lambda _: 20_000_000)
    assert "90 % of what is free" in refused(capsys, *few, "hardware.device=cpu")


def test_a_dry_run_prints_the_memory_of_its_largest_engine(make_config):
    jobs = [Job(make_config("condition=temp", "dataset.limit=2", "dry_run=true", "hardware.memory_gb=2", *more))
            for more in ((), ("hardware.num_slots=null", "num_chains=30"), ("num_chains=9",))]
    slots = [plan.check([job])[0] for job in jobs]
    assert [line.split(" slots of ")[0].split()[-1] for line in slots] == ["2", "60", "18"]
    assert all(line.startswith("memory: weights 6.5") for line in slots)
    layers = "the loop of this package, where Triton is installed"  # of another machine, which may have a GPU
    assert all(line.endswith(f" of 2.00 GB\nlayers: {layers}") for line in slots)
    assert plan.check(jobs)[0] == slots[1]
    assert plan.check([Job(make_config("condition=temp", "dataset.limit=2", "dry_run=true"))])[0] is None


def test_a_head_without_a_copy_takes_less_memory(make_config):
    shapes = [make_config("condition=temp", "model.dtype=bfloat16", f"model.head_copy={copy}").model.shape("cpu")
              for copy in ("true", "false", "null")]
    copied, plain, null = (shape.weight_bytes() for shape in shapes)
    assert copied - plain == 4 * 512 * 128
    assert null == copied
    assert shapes[2]._replace(device=torch.device("cuda")).weight_bytes() == plain


def test_weights_that_are_not_loaded_yet_take_their_part_of_the_free_memory(make_config, monkeypatch):
    config = make_config("condition=ps", "num_chains=99", "dataset.limit=2", "hardware.device=cpu")
    shape = config.model.shape("cpu")
    assert shape.weight_bytes() == pytest.approx(1.65e6 * 4, rel=0.01)
    prompts = build.prompts(config, config.model.prompt_encoder(), config.dataset.problems())
    longest = max(map(len, prompts.values()))
    _, planned = slots.memory_plan(config, shape, longest, 198, None)
    monkeypatch.setattr(memory, "free_bytes", lambda _: planned.total / 0.9 + 1e6)
    slots.memory_plan(config, shape, longest, 198, None)
    with pytest.raises(plan.UserError, match="slots"):
        plan.check([Job(config)])


def test_empty_selections_and_files_that_are_not_there_are_refused(capsys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "2"}\n')
    swept = ("-m", "condition=greedy", "dataset=jsonl", "dataset.max_new_tokens=64")
    assert "dataset.path: given" in refused(capsys, *swept, f"dataset.path={rows},{tmp_path}/none.jsonl")
    assert "dataset.shards: given [1]" in refused(
        capsys, *swept, f"dataset.path={rows}", "dataset.num_shards=2", "dataset.shards=[0],[1]")


def test_points_share_what_is_read_and_what_is_not_here_is_said(make_config, monkeypatch, capsys):
    made = {"problems": 0, "tokenizer": 0}
    configs = [make_config("condition=ps", f"sampler.alpha={alpha}", "dataset.limit=2") for alpha in (2, 3, 4)]
    dataset, model = type(configs[0].dataset), type(configs[0].model)

    def counted(name, method):
        def call(self):
            made[name] += 1
            return method(self)
        return call

    monkeypatch.setattr(dataset, "problems", counted("problems", dataset.problems))
    monkeypatch.setattr(model, "tokenizer", counted("tokenizer", model.tokenizer))
    plan.check([Job(config) for config in configs])
    assert made == {"problems": 1, "tokenizer": 1}
    plan.check([Job(make_config("model=hf", "model.path=nobody/absent", "condition=greedy", "draft=none"))])
    assert "config.json of nobody/absent is not in the cache" in capsys.readouterr().err


@pytest.mark.parametrize("draft", ["none", "ngram", "self", "tiny"])
def test_plan_without_weights_is_the_plan_of_the_loaded_pair(make_config, monkeypatch, draft):
    monkeypatch.undo()
    config = make_config("sampler=temperature", f"draft={draft}",
                         "decoder=" + ("plain" if draft == "none" else "speculative_match"))
    model = config.model.load("cpu")
    shape = config.model.shape("cpu")
    assert (shape.vocab_size, shape.max_positions, shape.cache_shape, shape.dtype) == (
        model.vocab_size, model.max_positions, model.cache_shape, model.dtype)
    assert shape.num_parameters == sum(weight.numel() for weight in {*model.decoder.parameters(), *model.head.parameters()})
    config.draft.check_target(shape)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 10**10)
    assert slots.memory_plan(config, shape, 100, 50, config.draft.size()) == slots.memory_plan(
        config, model, 100, 50, config.draft.load(model))


def test_weights_that_are_not_here_are_counted_from_the_configuration(make_config, monkeypatch, tmp_path, capsys):
    whole = make_config("condition=greedy", "dataset.limit=1", "hardware.memory_gb=4")
    folder = tmp_path / "model"
    shutil.copytree(whole.model.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    lacking = dataclasses.replace(whole, model=dataclasses.replace(whole.model, path=str(folder)))
    assert lacking.model.shape("cpu").num_parameters == whole.model.shape("cpu").num_parameters
    told = [plan.check([Job(config)])[0] for config in (whole, lacking)]
    assert told[0] == told[1]
    assert "weights " in told[1]
    note.cache_clear()
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *_, **__: 1 / 0)
    assert "weights" not in plan.check([Job(lacking)])[0]
    assert "memory: the size of the weights is not known" in capsys.readouterr().err


def test_a_complete_run_reads_nothing_of_the_model(make_config, monkeypatch):
    config = make_config("condition=greedy", "dataset.limit=2", "num_chains=2")
    folder = run_folder(config, identity_hash(config))
    folder.mkdir(parents=True)
    lines = [to_line(record(problem.id, chain=chain)).decode()
             for problem in config.dataset.problems() for chain in range(2)]
    read = []
    shape = type(config.model).shape
    monkeypatch.setattr(type(config.model), "shape", lambda self, device: (read.append(device), shape(self, device))[1])
    for content, expected in (("".join(lines), []), ("".join(lines[1:]), ["cpu"]), ("{}\n", ["cpu"])):
        (folder / "records.jsonl").write_text(content)
        read.clear()
        plan.check([Job(config)])
        assert read == expected


@pytest.mark.slow
def test_neither_a_complete_run_nor_a_dry_run_imports_pytorch(make_config, tmp_path):
    given = ("condition=greedy", "dataset.limit=1", "tracker=none", f"paths.outputs={tmp_path}/made")
    config = make_config(*given)
    folder = run_folder(config, identity_hash(config))
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_bytes(to_line(record(config.dataset.problems()[0].id)))
    code = f"""
import sys
from dflash_mcmc.config.command import check_command
from dflash_mcmc.runner import plan
for more in ([], ["dry_run=true"], ["num_chains=2"]):
    plan.check(check_command([*{given!r}, *more]).jobs)
    print("transformers" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False", "True False", "True True"]
