"""The draft of SmolLM2 that ships with the package: its shape, its size, and where it comes from."""

import json

import torch

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.train.recipe import compose
from tests.composing import composed

FOLDER = PACKAGE / "assets/smollm2_draft"


def test_it_fits_the_model_and_is_small():
    draft = checkpoint.load(FOLDER, None, "cpu")
    checkpoint.check_pair(draft.shape, hidden_size=576, vocab_size=49_152, num_layers=30)
    assert draft.shape.dtype == torch.bfloat16
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 15_000_000
    assert all(parameter.isfinite().all() for parameter in draft.parameters())


def test_it_has_the_shape_of_its_recipe(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    plan = compose("smollm2", [f"prompts.path={tmp_path / 'prompts.jsonl'}", f"model.path={tmp_path}"])
    config = json.loads((FOLDER / "config.json").read_text())
    assert {name: config["training"][f"shape.{name}"] for name in ("num_layers", "intermediate_size", "num_features")} == {
        "num_layers": plan.shape.num_layers, "intermediate_size": plan.shape.intermediate_size,
        "num_features": plan.shape.num_features}
    assert config["training"]["model.content"]


def test_it_is_the_draft_of_its_name(tmp_path):
    config = composed(tmp_path, "draft=smollm2", "decoder=speculative_match")
    assert config.draft.path == str(FOLDER)
