"""A planted mistake is found by its change; a healthy draft is called healthy."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dflash_mcmc.chains import build
from dflash_mcmc.draft import CheckpointDraft
from dflash_mcmc.drafts import check
from dflash_mcmc.drafts.__main__ import configured, default_folder, main
from dflash_mcmc.drafts.check import Change, Checked, Ratio, Trial
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.errors import UserError
from dflash_mcmc.statistics.estimates import IntervalEstimate
from tests.cases import quick
from tests.composing import composed
from tests.drafts import plants

BASE = ("sampler=greedy", "decoder=speculative_match", "decoder.trace=true", "dataset.limit=10", "dataset.max_new_tokens=32")
LONG = ("dataset.limit=24", "dataset.max_new_tokens=64")
"""Layers that are off by one cost a tenth of the tokens."""
PLANTS = {  # the draft, the checkpoint that is edited, the edits, the change that puts it right, and what the verdict says
    "rows predict the next place": ("tiny", "tiny_dspark", (plants.without_heads, plants.drop_heads), "rows one later",
                                    "each row predicts the token after its own slot"),
    "rows predict the place before": ("tiny_dspark", "tiny_draft", (plants.from_anchor,), "rows one earlier",
                                      "each row predicts the token before its own slot"),
    "layers one too high": ("tiny", "tiny_draft", (plants.own(target_layer_ids=[2, 3, 4, 5, 6]),), "layers [1, 2, 3, 4, 5]",
                            "the layers of the features, [2, 3, 4, 5, 6], are one too high"),
    "layers one too low": ("tiny", "tiny_draft", (plants.own(target_layer_ids=[0, 1, 2, 3, 4]),), "layers [1, 2, 3, 4, 5]",
                           "the layers of the features, [0, 1, 2, 3, 4], are one too low"),
}


@pytest.mark.parametrize("draft", quick(["tiny", "tiny_dspark", "tiny_dflash2"], "tiny_dspark"))
def test_the_command_calls_a_healthy_pair_healthy_and_writes_what_it_measured(draft, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(CheckpointDraft, "training_record", lambda self: {"held_out_tau": 1.676})
    with pytest.raises(SystemExit, match="0"):
        main(["check", "model=tiny", f"draft={draft}", "dataset=arith", "dataset.limit=8", "dataset.max_new_tokens=32",
              f"--out={tmp_path / 'out'}"])
    values, said = json.loads((tmp_path / "out/check.json").read_text()), capsys.readouterr().out
    assert values["verdict"].endswith("rows and layers are right")
    assert values["verdict"] in said
    assert (values["problems"], values["agreement"]) == (8, 1.0)
    assert re.search(r"tiny_\w+ on \S*tiny, 8 problems; tau of its training is 1.68\n", said)
    taus = {place["name"]: place["tau"] for place in values["positions"]}
    assert taus["temperature 0"] > 2.0
    assert f"| temperature 1, tokens 0 to 15  | {taus['temperature 1, tokens 0 to 15']:.2f} " in said
    assert {trial["name"]: trial["helps"] for trial in values["trials"]} == dict.fromkeys(
        ("rows one later", "rows one earlier", "layers [2, 3, 4, 5, 6]", "layers [0, 1, 2, 3, 4]"), False)


@pytest.mark.slow
def test_a_block_is_drafted_again_as_the_engine_has_it_also_in_a_layout_that_is_moved_back(tmp_path):
    config = composed(tmp_path, *BASE, "dataset.limit=3", "draft=tiny", "draft.block_size=4")
    model = config.model.load("cpu")
    drafter = config.draft.load(model)
    walks = check.draw(config, model, drafter, build.prompts(config, model, config.dataset.problems()), 0.0)
    agreement, trials = check.redrafted(drafter, walks)
    assert agreement == 1.0
    assert max(max(walk.gained) for walk in walks) == 4
    assert trials[0].base_tau == Ratio.of([walk.gained for walk in walks]).tau().known
    path = plants.planted(tmp_path / "moved", "tiny_draft",
                          lambda values: plants.from_anchor(values) or values.update(block_size=4))
    moved = composed(tmp_path, *BASE, "draft=tiny_dspark", f"draft.path={path}").draft.load(model)
    earlier = check.redrafted(moved, walks)[1][1]
    assert (earlier.change.name, earlier.tau.known) == ("rows one earlier", trials[0].base_tau)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_named(name, tmp_path):
    draft, asset, edits, change, says = PLANTS[name]
    path = plants.planted(tmp_path / "draft", asset, *edits)
    found = check.check(composed(tmp_path, *BASE, *(LONG if "layers" in name else ()), f"draft={draft}", f"draft.path={path}"))
    assert found.verdict().startswith(("the block is off by one slot: " if "rows" in name else "") + says)
    (helping,) = [trial for trial in found.trials if trial.helps]
    assert helping.change.name == change
    assert found.agreement == 1.0


@pytest.mark.slow
def test_a_mistake_of_the_engine_is_told_from_one_of_the_checkpoint(tmp_path, monkeypatch):
    absorb = DFlashDrafter.absorb
    monkeypatch.setattr(DFlashDrafter, "absorb", lambda self, cache, rows, tokens, positions, features: absorb(
        self, cache, rows, tokens, positions, [feature.flip(-1) for feature in features]))
    assert "in the engine" in check.check(composed(tmp_path, *BASE, "draft=tiny")).verdict()


def estimate(value: float, half: float) -> IntervalEstimate:
    return IntervalEstimate(value, value - half, value + half, 100)


def trial(tau: float, base: float, error: float, name: str = "rows one later") -> Trial:
    return Trial(Change(name, f"{name} fit", ()), estimate(tau, error), base, estimate(tau - base, 1.96 * error))


@pytest.mark.parametrize(("says", "problems", "agreement", "trials"), [
    ("tau is 4.00 [3.70, 4.30]; rows and layers are right", 20, 1.0, []),
    ("too few problems for a check; take at least 8", 7, 1.0, [trial(4.4, 4.0, 0.1)]),
    ("in only 90%: the mistake is in the engine", 20, 0.9, [trial(4.4, 4.0, 0.1)]),
    ("rows one later fit (tau is 4.40 with rows one later, 4.00 without)", 20, 1.0,
     [trial(4.3, 4.0, 0.01, "another"), trial(4.4, 4.0, 0.1)]),
    ("rows and layers are right", 20, 1.0, [trial(4.4, 4.0, 0.12)]),  # 3.3 standard errors
    ("rows and layers are right", 20, 1.0, [trial(4.15, 4.0, 0.001)]),  # 4 per cent
])
def test_verdict(says, problems, agreement, trials):
    found = Checked("tiny x", problems, {"temperature 0": estimate(4.0, 0.3)}, agreement, trials)
    assert says in found.verdict()


def test_a_paired_change_has_a_narrower_interval_than_its_parts():
    tokens, forwards = np.arange(20.0) + 20.0, np.full(20, 10.0)
    found = check.trial(Change("name", "", ()), Ratio(tokens + 1.0, forwards), Ratio(tokens, forwards))
    assert found.difference.interval == pytest.approx((0.1, 0.1))
    assert found.tau.interval[1] - found.tau.interval[0] > 0.3


def test_changes_stay_within_the_target():
    assert [change.name for change in check.changes((0, 7), 8)] == ["nothing", "rows one later", "rows one earlier"]


@pytest.mark.parametrize(("arguments", "says"), [
    (["look"], "allowed: check, speed"), (["speed", "--trace=x"], "not an option"),
    (["speed", "draft=none"], "draft: given 'none'; allowed: a draft, such as tiny"),
    (["speed", "draft=tiny", "decoder=plain"], "decoder: given 'plain'; allowed: speculative_match"),
    (["speed", "draft=tiny", "decoder.trace=true"], "decoder.trace: given True; allowed: false with drafts speed, which"),
    (["speed", "sampler=greedy"], "sampler: given with drafts speed; allowed: model"), (["check", "--wrong"], "not an option"),
    (["check", "sampler=greedy"], "sampler: given with drafts check; allowed: model"),
    (["check", "model=tiny", "draft=tiny", f"--out={__file__}"], "a file; allowed: a folder"),
    (["check", "decoder.trace=false"], "decoder.trace: given with drafts check"),
    (["check", "draft=tiny", "dataset.limit=2,3"], "several values"),
])
def test_a_wrong_command_line_is_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")


def test_a_draft_without_a_network_is_refused(tmp_path):
    with pytest.raises(UserError, match="draft: given 'ngram'; allowed: dflash, dspark or dflash2"):
        check.check(composed(tmp_path, *BASE, "draft=ngram"))


def test_the_configuration_has_a_default_number_of_problems(tmp_path):
    config, names = configured(["model=tiny", "draft=tiny", f"paths.outputs={tmp_path}"])
    assert (config.dataset.limit, config.dataset.max_new_tokens, names["draft"]) == (32, 128, "tiny")
    assert configured(["draft=tiny", "dataset.limit=5"])[0].dataset.limit == 5


def test_each_draft_has_a_folder_of_its_own(tmp_path):
    """Drafts that are given by path have the name of the path, and those without a path that of their option."""
    shutil.copytree(Path(composed(tmp_path, *BASE, "draft=tiny").draft.path), tmp_path / "mine")
    names = [default_folder(*configured(["model=tiny", *draft, f"paths.outputs={tmp_path}"], "speed")).name
             for draft in (["draft=tiny"], ["draft=tiny", f"draft.path={tmp_path}/mine"], [f"draft={tmp_path}/mine"],
                           ["draft=ngram"])]
    assert names == ["tiny-tiny_draft", "tiny-mine", "tiny-mine", "tiny-ngram"]
