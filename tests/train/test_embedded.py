"""Training the embedded target: the loss falls, and the checkpoint is loaded like any model."""

import json

import pytest

from dflash_mcmc.config import command
from dflash_mcmc.config.schema import PACKAGE
from tests.refusals import refused
from tests.runs import execute
from tests.train import embedded

SMALL = ("steps=6", "batch_size=4", "evaluate_every=2", "problems_per_level=1", "warmup_steps=2", "num_threads=1")


@pytest.fixture
def plan(tmp_path):
    """A plan of six small steps; further overrides may be given."""
    def make(*overrides: str) -> embedded.TrainingPlan:
        made, choices = command.compose_once("train", [*SMALL, f"paths.outputs={tmp_path}", *overrides], embedded.TrainingPlan)
        made.check(choices["model"])
        return made
    return make


@pytest.mark.slow
def test_the_loss_falls_and_model_path_loads_the_result(plan, make_config):
    folder = embedded.train(plan("steps=30", "batch_size=16"))
    lines = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 31, 2))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    assert execute(make_config(f"model.path={folder}", "sampler=greedy", "dataset.limit=2")).summary["num_samples"] == 2


def test_learning_rate_warms_up_is_constant_and_falls_to_zero(plan):
    made = plan("steps=100", "warmup_steps=10", "decay_fraction=0.3", "learning_rate=2.0")
    rates = [embedded.learning_rate(made, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9:71] == [2.0] * 62
    assert rates[85] == pytest.approx(1.0)
    assert rates[100] == 0.0
    assert sorted(rates[70:], reverse=True) == rates[70:]


@pytest.mark.slow
def test_the_recipe_reproduces_the_shipped_tokenizer():
    pairs = embedded.training_pairs(0, 0, 10_000)
    built = embedded.build_tokenizer(text for pair in pairs for text in pair).backend_tokenizer.to_str()
    shipped = json.loads((PACKAGE / "assets/tiny/tokenizer.json").read_text())
    assert json.loads(built)["model"]["vocab"] == shipped["model"]["vocab"]


def test_another_model_is_refused(plan):
    with refused("model: given 'qwen3_4b'; allowed: 'tiny'"):
        plan("model=qwen3_4b")
