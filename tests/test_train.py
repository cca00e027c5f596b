"""`python -m dflash_mcmc.train`: a small training of a draft, the help text, and a bad option. How `model=tiny` was made."""

from __future__ import annotations

import pytest

SMALL = ("steps=2", "batch_size=4", "evaluate_every=2", "num_threads=1")
DRAFT = (*SMALL, "prompts.num=8", "prompts.held_out=2", "responses.max_new_tokens=12", "shape.num_layers=1", "anchors=2")


@pytest.mark.slow
def test_trains_the_embedded_target(command):
    done = command("tests.train.embedded", *SMALL, "problems_per_level=1", "warmup_steps=1")
    assert done.returncode == 0, done.stderr
    assert "model written to outputs/train/tiny-" in done.stdout


def test_trains_a_draft(command):
    done = command("dflash_mcmc.train", "draft=tiny", *DRAFT)
    assert done.returncode == 0, done.stderr
    assert "draft written to outputs/train/draft-" in done.stdout
    assert "tokens for each forward of the target" in done.stdout + done.stderr


def test_help_lists_the_fields(command, tmp_path):
    done = command("dflash_mcmc.train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m dflash_mcmc.train draft=tiny" in done.stdout
    assert "responses.max_new_tokens" in done.stdout
    assert "whole number >= 2; default 2048: maximal length of a response in tokens" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_draft_is_an_error_of_one_line(command, tmp_path):
    done = command("dflash_mcmc.train", "draft=tny", *DRAFT)
    assert done.returncode == 2
    assert done.stderr == ("error: draft: given 'tny' (did you mean 'tiny'?); allowed: 'tiny', 'smollm2', "
                           "'qwen2_5_coder_0_5b', 'dflash'\n")
    assert list(tmp_path.iterdir()) == []
