"""Where a training starts, and that only one process trains in a folder."""

import json
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.errors import RunBusy
from dflash_mcmc.train import draft
from dflash_mcmc.train.recipe import identity_of, responses_folder, run_folder
from tests.refusals import refused

SMALL = ("steps=1", "batch_size=2", "evaluate_every=1", "num_threads=1", "prompts.num=2", "prompts.held_out=1",
         "responses.max_new_tokens=4", "responses.held_out=[0.0]", "anchors=2")
SHIPPED = PACKAGE / "assets/tiny_draft"
LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_training_starts_from_the_weights_of_a_checkpoint(plan):
    given = plan(f"init={SHIPPED}")
    target, shipped = given.model.load("cpu"), checkpoint.load(SHIPPED, torch.float32, "cpu")
    for block_size in (8, 4):  # no weight depends on it
        given.shape.block_size = block_size
        first = draft.first_draft(given, draft.shape_of(given, target), target)
        assert first.shape.block_size == block_size
        assert all(torch.equal(value, shipped.state_dict()[name]) for name, value in first.state_dict().items())
        assert all(parameter.requires_grad for parameter in first.parameters())


def test_a_start_of_another_shape_is_one_line(plan):
    given = plan(f"init={SHIPPED}", "shape.num_layers=2")
    target = given.model.load("cpu")
    with refused("a draft with num_layers 2, as the plan's; this one has 3", start="init: given"):
        draft.first_draft(given, draft.shape_of(given, target), target)
    with refused("init: given '/no/such/folder'"):
        plan("init=/no/such/folder")


def test_the_start_is_known_by_its_content(plan, tmp_path):
    base, given = plan(), plan(f"init={SHIPPED}")
    assert identity_of(base)["init"] is None
    assert run_folder(given) != run_folder(base)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in SHIPPED.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert run_folder(plan(f"init={moved}")) == run_folder(given)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "note": "another"}))
    assert run_folder(plan(f"init={moved}")) != run_folder(given)


def test_trainings_that_differ_in_other_things_share_their_responses(plan):
    base = responses_folder(plan())
    for same in (("learning_rate=1e-3",), ("shape.num_layers=1",), (f"init={SHIPPED}",), ("steps=9",)):
        assert responses_folder(plan(*same)) == base, same
    for other in (("seed=1",), ("prompts.num=3",), ("responses.max_new_tokens=5",), ("model.chat=false",)):
        assert responses_folder(plan(*other)) != base, other


def one_step(folder, gradients: Callable[[int], float] = lambda step: 0.0, **figures: float) -> draft.TrainingLoop:
    return draft.TrainingLoop(name="one step", folder=folder, steps=1, evaluate_every=1, rate=lambda step: 0.1,
                             gradients=gradients, evaluate=lambda: figures, describe=str)


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 0.0), (1.0, math.inf)])
def test_a_step_that_is_not_finite_ends_the_training_and_changes_nothing(loss, gradient, tmp_path, random_weights):
    module = torch.nn.Linear(1, 1)
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def gradients(step: int) -> float:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        return loss

    with refused("in step 1, which has a loss of", start="learning_rate: given a rate of 0.1"):
        draft.run(one_step(tmp_path, gradients), module, torch.optim.AdamW(module.parameters()))
    assert all(map(torch.equal, before, module.parameters()))
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_second_training_in_the_folder_is_refused(tmp_path, random_weights):
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    training = one_step(tmp_path)
    with subprocess.Popen([sys.executable, "-c", LOCK, str(tmp_path / "lock")], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunBusy, match=f"{tmp_path}: another process trains here"):
            draft.run(training, module, optimizer)
        assert not (tmp_path / "checkpoint.pt").exists()
        other.stdin.close()
    draft.run(training, module, optimizer)
    assert (tmp_path / "checkpoint.pt").exists()


def test_without_a_step_the_start_is_evaluated(plan, capsys):
    given = plan(f"init={SHIPPED}", "steps=0", "responses.max_new_tokens=80")
    folder = draft.train(given)
    shown = capsys.readouterr().out
    assert "tokens for each forward of the target: " in shown
    (line,) = (json.loads(text) for text in (run_folder(given) / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 0
    assert line["tau_0"] > 2
    assert f"{line['tau_0']:.2f} at temperature 0" in shown
    kept, shipped = (checkpoint.load(path, None, "cpu").state_dict() for path in (folder, SHIPPED))
    assert all(torch.equal(value, shipped[name]) for name, value in kept.items())
    assert not list(responses_folder(given).glob("train/*.npz"))
    with refused("allowed: a number >= 1, or 0 with init=FOLDER", start="steps: given 0"):
        plan("steps=0")
    record = json.loads((folder / "config.json").read_text())["training"]
    assert record["held_out_tau"] == line["tau_0"]
    assert record["model.weights"] == given.model.weights_fingerprint()


@pytest.mark.parametrize(("figures", "tau"), [({"tau_0.5": 1.5, "tau_0": 2.0, "tau_1": 2.5}, 2.0), ({"tau_1": 2.5}, None)])
def test_the_record_states_the_tau_of_temperature_0_alone(plan, tmp_path, figures, tau):
    given = plan(f"init={SHIPPED}")
    draft.export(checkpoint.load(SHIPPED, torch.float32, "cpu"), given, given.model.load("cpu"), tmp_path / "draft", figures)
    training = json.loads((tmp_path / "draft/config.json").read_text())["training"]
    assert training.get("held_out_tau") == tau
    assert ("held_out_tau" in training) == (tau is not None)


def test_a_training_that_was_finished_has_its_figures_again(tmp_path, random_weights):
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    training = one_step(tmp_path, tau_0=2.5)
    assert draft.run(training, module, optimizer)["tau_0"] == draft.run(training, module, optimizer)["tau_0"] == 2.5
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
