"""Training a draft: a resumed run ends with the same weights, the loss falls, and the result is loaded like any draft."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.train import draft
from dflash_mcmc.train.draft import questions
from dflash_mcmc.train.loss import speculated
from dflash_mcmc.train.recipe import compose, identity_of
from tests.conftest import ROOT
from tests.processes import HANG
from tests.refusals import refused
from tests.targets import FAMILIES, random_model
from tests.tracker import lines as tracked

SMALL = ("steps=6", "batch_size=4", "evaluate_every=2", "num_threads=1", "prompts.num=12", "prompts.held_out=2",
         "responses.max_new_tokens=16", "shape.num_layers=1", "shape.intermediate_size=32", "anchors=3", "loss_gamma=4")


def evaluations(folder) -> list[dict]:
    return [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights(plan, tmp_path, monkeypatch):
    whole = draft.train(plan(f"paths.outputs={tmp_path / 'whole'}"))
    stopped = plan(f"paths.outputs={tmp_path / 'stopped'}")
    optimise, write, calls = draft.optimise, draft._write, []

    def stop_at_once(piece, drawn):
        raise KeyboardInterrupt

    def stop_at_fourth(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return optimise(*arguments)

    def refuse(*arguments):
        raise AssertionError("responses are drawn again")

    monkeypatch.setattr(draft, "_write", stop_at_once)
    with pytest.raises(KeyboardInterrupt):
        draft.train(stopped)
    monkeypatch.setattr(draft, "_write", write)
    monkeypatch.setattr(draft, "optimise", stop_at_fourth)
    with pytest.raises(KeyboardInterrupt):
        draft.train(stopped)
    monkeypatch.setattr(draft, "_draw", refuse)
    continued = draft.train(stopped)
    assert len(calls) == 8  # first run: 3 and the stopped one; second run, from the checkpoint at 2: 4
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (whole, continued))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert evaluations(whole) == evaluations(continued)


@pytest.mark.slow
def test_the_loss_falls_and_the_result_is_loaded_like_any_draft(plan, tmp_path, monkeypatch):
    made = plan("steps=40", "evaluate_every=20", "learning_rate=0.01", f"export={tmp_path / 'there'}", "tracker=trackio")
    tracked.use(monkeypatch.setattr)
    folder = draft.train(made)
    assert folder == tmp_path / "there"
    (run,) = (tmp_path / "train").glob("draft-*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = [line for line in lines if "tau_0" in line]
    assert [line["step"] for line in figures] == [20, 40]
    assert figures[1]["loss"] < figures[0]["loss"] - 0.5
    assert all(1.0 <= line[name] <= 16.0 for line in figures for name in ("tau_0", "tau_1"))
    assert [line["step"] for line in lines if "train/loss" in line] == [10, 20, 30, 40]
    loaded = checkpoint.load(folder, None, "cpu")
    trained = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(value, trained[name].bfloat16()) for name, value in loaded.state_dict().items())
    config = json.loads((folder / "config.json").read_text())
    assert config["training"]["steps"] == 40
    assert config["training"]["held_out_tau"] == figures[1]["tau_0"]
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_one(plan, tmp_path):
    small = ("steps=2", "precision=float32", "evaluate_every=2")
    alone = load_file(draft.train(plan(*small)) / "model.safetensors")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
               "--main_process_port", "0", "-m", "dflash_mcmc.train", "draft=tiny", *SMALL, *small, "export=both"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-2000:]
    both = load_file(tmp_path / "both" / "model.safetensors")
    assert all(torch.allclose(alone[name].float(), both[name].float(), rtol=0.02, atol=2e-4) for name in alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_open_fields_of_the_shape_are_the_targets(plan, family):
    model = LanguageModel(random_model(family))
    shape = draft.shape_of(plan("shape.mask_token_id=9", "shape.num_features=1", "shape.intermediate_size=null"), model)
    key_heads = 4 if family == "gpt2" else 2
    assert (shape.hidden_size, shape.num_heads, shape.num_key_heads, shape.head_dim) == (32, 4, key_heads, 8)
    assert (shape.target_layers, shape.mask_token_id, shape.intermediate_size) == (
        (1,), 9, 128 if family == "gpt2" else 48)


@pytest.mark.parametrize(("overrides", "message"), [
    (["shape.num_features=2", "shape.mask_token_id=9"], "shape.num_features: given 2; allowed: at most 1 for a target of"),
    (["shape.num_features=1", "shape.mask_token_id=61"], "shape: the draft has mask_token_id 61; allowed: an id below 61"),
    (["shape.num_features=1"], "shape.mask_token_id: given None; allowed: an id"),
])
def test_a_shape_that_does_not_fit_the_target_is_an_error_of_one_line(plan, overrides, message):
    with refused(message):
        draft.shape_of(plan(*overrides), LanguageModel(random_model()))


def test_too_long_responses_and_empty_prompts_are_errors_before_sampling(plan, tmp_path):
    with refused(start="responses.max_new_tokens: given 1024; allowed: at most"):
        draft.train(plan("responses.max_new_tokens=1024"))
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 1?"}\n{"question": ""}\n{"question": "2 + 2?"}\n')
    with refused("allowed: prompts of at least one token; '' gives an empty one", start="prompts.path: given"):
        draft.train(plan(f"prompts.path={tmp_path / 'questions.jsonl'}", "prompts.num=2", "prompts.held_out=1", "batch_size=2",
                         "model.chat=false"))


def test_the_shipped_draft_has_its_recipe_and_a_high_accepted_length(tmp_path):
    plan = compose("tiny", ["prompts.num=8", "prompts.held_out=6"])
    folder, target = PACKAGE / "assets/tiny_draft", plan.model.load("cpu")
    shipped = checkpoint.load(folder, torch.float32, "cpu")
    assert shipped.shape == dataclasses.replace(draft.shape_of(plan, target), dtype=torch.bfloat16)
    recipe, trained = identity_of(compose("tiny", [])), json.loads((folder / "config.json").read_text())["training"]
    assert {field: value for field, value in trained.items() if field in recipe} == {
        field: value for field, value in {**recipe, "version": 1}.items() if field in trained}
    held_out = draft.responses(plan, target, tmp_path, draft.Request("held-out", questions(plan).held_out, [0.0]))
    tokens, forwards = speculated(shipped, target, held_out, 6, 16)
    assert tokens / forwards > 3.5
