"""Training an EAGLE-3 draft: its steps are those of the drafter, the loss falls, and the result drafts in a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.eagle3 import FAMILY
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.train import draft
from dflash_mcmc.train.blocks import TargetReader, drafted, gather
from dflash_mcmc.train.recipe import compose
from tests.draft.network.test_eagle3 import drafter_of, layout, proposed, stored
from tests.runs import execute, records_of
from tests.targets import random_model
from tests.train.drafts import random_responses

SMALL = ("model=tiny", "steps=12", "batch_size=4", "evaluate_every=6", "num_threads=1", "prompts.path=null", "prompts.num=12",
         "prompts.held_out=2", "responses.max_new_tokens=16", "shape.intermediate_size=64", "shape.block_size=5", "anchors=6",
         "learning_rate=0.01")


def test_steps_are_those_of_the_drafter(tmp_path):
    """Of blocks anywhere in the text: each reads features up to its anchor, and its own states after it."""
    model = random_model("qwen3")
    target = LanguageModel(model)
    drafter = drafter_of(stored(layout("specforge", model, None, (1, 0, 2)), tmp_path), target, 3)
    object.__setattr__(drafter.network.shape, "num_drafted", 3)
    responses = random_responses((15, 12))
    blocks = gather(responses, [np.array([1, 4, 9]), np.array([8])])
    with torch.no_grad():
        features = TargetReader(target, drafter.network.shape.target_layers)(blocks.tokens).features
        hidden = drafted(drafter.network, target, features, blocks)
        logits = hidden @ drafter.network.lm_head.weight.T
    for row, anchors in enumerate(blocks.anchors.tolist()):
        for number, anchor in enumerate(anchors):
            if anchor >= 0:
                text = tuple(responses[row].tokens.tolist())
                expected = proposed(drafter, text[: anchor + 1], text[anchor + 1 : anchor + 3])
                np.testing.assert_allclose(logits[row, number].numpy(), expected, atol=1e-4)


def test_the_loss_falls_and_the_result_drafts(make_config, tmp_path):
    folder = draft.train(compose("eagle3", [*SMALL, f"paths.outputs={tmp_path}"]))
    first, second = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert second["loss"] < first["loss"] - 0.1
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "midlayer.self_attn.q_proj.weight" in set(file.keys())  # the name that SpecForge and other engines know
    assert checkpoint.load(folder, torch.float32, "cpu", FAMILY).shape.target_layers == (1, 3, 5)
    given = ("sampler=temperature", "dataset.limit=2", "dataset.max_new_tokens=16")
    speculated = records_of(execute(make_config(
        *given, "draft=eagle3", f"draft.path={folder}", "decoder=speculative_match")).folder)
    plain = records_of(execute(make_config(*given)).folder)
    assert [each["tokens"] for each in speculated.values()] == [each["tokens"] for each in plain.values()]


@pytest.mark.parametrize(("overrides", "line"), [
    (["shape.num_layers=2"], "shape.num_layers: given 2; allowed: 1 with network=eagle3"),
    (["shape.num_features=5"], "shape.num_features: given 5; allowed: 3 with network=eagle3"),
    (["loss_ids=64"], "loss_ids: given 64; allowed: null with network=eagle3"),
])
def test_what_is_refused(overrides, line):
    with pytest.raises(UserError, match=line):
        compose("eagle3", [*SMALL, *overrides])
