"""`make smollm2` as an experiment: its problems ship with the package and are not those that the draft was trained on."""

from __future__ import annotations

import json

import pytest

from dflash_mcmc.config.schema import PACKAGE
from tests.composing import composed
from tests.conftest import SHARED

PROBLEMS = PACKAGE / "assets/real"
TRAINED = {"gsm8k": 1200, "math500": 400}
"""Number of leading problems of the whole files from which prompts of the draft's training were taken."""


@pytest.mark.parametrize(("dataset", "number"), [("gsm8k", 24), ("math500", 18)])
def test_problems_ship_with_the_package(tmp_path, dataset, number):
    config = composed(tmp_path, "experiment=smollm2", "condition=ps", f"dataset={dataset}", "model=tiny", "draft=none")
    assert config.dataset.num_all() == number
    assert (config.dataset.num_chosen(), config.sampler.num_blocks, config.dataset.max_new_tokens) == (12, 4, 192)
    assert config.grader.extract == "auto"
    licence = {"gsm8k": "LICENSE.gsm8k", "math500": "LICENSE.prm800k"}[dataset]
    assert "MIT License" in (PROBLEMS / licence).read_text()


@pytest.mark.parametrize("dataset", TRAINED)
def test_they_are_rows_of_the_whole_files_that_were_held_out(dataset):
    if not SHARED.is_dir():
        pytest.skip(f"real data not found at {SHARED}")
    whole = [json.loads(line) for line in (SHARED / dataset / "test.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (PROBLEMS / f"{dataset}.jsonl").read_text().splitlines()]
    assert all(whole.index(row) >= TRAINED[dataset] for row in rows)


@pytest.mark.parametrize(("dataset", "number"), [("gsm8k", 24), ("math500", 18)])
def test_real_asks_for_a_box_and_leaves_room_for_the_answer(tmp_path, dataset, number):
    config = composed(tmp_path, "experiment=real", "condition=ps", f"dataset={dataset}", "model=tiny")
    assert config.dataset.num_all() == number
    assert (config.sampler.schedule, config.sampler.num_blocks, config.sampler.num_steps) == ("adaptive", 16, 2)
    assert config.dataset.max_new_tokens == 512
    assert "\\boxed{}" in config.dataset.prompt
    assert config.grader.extract == "boxed"


def test_the_blend_of_smollm2_reads_the_normed_layer(tmp_path):
    """Its raw logits destroy the text; those of the other models do not, and stay as published."""
    for experiment, norm in (("smollm2", "final"), ("real", "none")):
        config = composed(tmp_path, f"experiment={experiment}", "condition=blend_ps", "dataset=gsm8k", "model=tiny")
        assert config.blend.norm == norm
