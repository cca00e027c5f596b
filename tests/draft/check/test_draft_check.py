"""Every planted mistake is put right by its alternative, and named; a healthy draft is called healthy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dflash_mcmc.draft.check import check as checking
from dflash_mcmc.draft.check import forced, report
from dflash_mcmc.draft.check.check import Checked, Difference, Ratio, Row, Trial, check
from dflash_mcmc.draft.check.forced import alternatives
from dflash_mcmc.drafts import configured, default_folder, main
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.statistics.intervals import IntervalEstimate
from tests.composing import composed
from tests.draft.check import plants

BASE = ("sampler=greedy", "decoder=speculative_match", "decoder.trace=true", "dataset.limit=10", "dataset.max_new_tokens=32")

FEW = ("dataset.limit=8", "dataset.max_new_tokens=16")
"""float16 is slow on a processor."""


class Plant(NamedTuple):
    """A planted mistake: how, the alternative that puts it right, and what the sentence says."""

    kind: str
    name: str
    says: str
    draft: str = "tiny"
    asset: str = "tiny_draft"
    config: object = None
    tensors: object = None
    overrides: tuple[str, ...] = ()


PLANTS = {
    "rows predict the next place": Plant("layout", "rows one later", "slot 1 predicts the token of slot 2 in", "tiny",
                                         "tiny_dspark", plants.without_heads, plants.drop_heads),
    "rows predict the place before": Plant("layout", "rows one earlier", "slot 2 predicts the token of slot 1 in",
                                           "tiny_dspark", "tiny_draft", plants.from_anchor),
    "layers one too high": Plant("layers", "every layer - 1", "layers of the features are one too high",
                                 config=plants.own(target_layer_ids=[2, 3, 4, 5, 6])),
    "layers one too low": Plant("layers", "every layer + 1", "layers of the features are one too low",
                                config=plants.own(target_layer_ids=[0, 1, 2, 3, 4])),
    "layers reversed": Plant("layers", "layers reversed", "reversed order",
                             config=plants.own(target_layer_ids=[5, 4, 3, 2, 1])),
    "features exchanged": Plant("layers", "features 1 and 5 exchanged", "features 1 and 5 are exchanged",
                                tensors=plants.exchange_features(0, 4)),
    "mask": Plant("mask", "mask 473", "mask_token_id is 470", config=plants.own(mask_token_id=470)),
    "rotation": Plant("rope", "rope_theta 10000 ", "rope_theta is 1e+06, and 10000 fits", config=plants.top(rope_theta=1e6)),
    "block too large": Plant("block", "block size 8", "the block size 16 is larger than the trained one",
                             config=plants.top(block_size=16)),
    "block too small": Plant("block", "block size 8", "the block size 4 is smaller than the trained one",
                             config=plants.top(block_size=4)),
    "float16 overflows": Plant("dtype", "the draft in float32", "the draft runs in float16",
                               tensors=plants.large_projection, overrides=("draft.dtype=float16", *FEW)),
}
TEMPLATES = {"model.chat=false": "model.chat=true", "model.enable_thinking=true": "model.enable_thinking=false",
             "dataset.system=Help.": "no system turn"}


def overrides(plant: Plant, folder: Path) -> list[str]:
    edits = {name: edit for name, edit in (("config", plant.config), ("tensors", plant.tensors)) if edit is not None}
    path = plants.planted(folder / "draft", plant.asset, **edits)
    return [f"draft={plant.draft}", f"draft.path={path}", *plant.overrides]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The embedded target, and its greedy answers with the blocks of the healthy draft."""
    config = composed(tmp_path_factory.mktemp("healthy"), *BASE, "draft=tiny")
    model = config.model.load("cpu")
    return model, forced.draw(config, model, config.draft.load(model), forced.prompts_of(config, model), 0.0,
                                 "healthy"), config


def drafted_again(config, model, drawn, kind=None, name=""):
    """The alternatives of a kind whose names begin so, and the blocks of the draft as it is and in each of them."""
    drafter = config.draft.load(model)
    subject = checking._subject(config, drafter, model, None)
    chosen = [each for each in alternatives(subject, [kind] if kind else []) if each.name.startswith(name)]
    kept = [np.arange(len(walk.gained)) for walk in drawn]
    found = forced.forced(model, drawn, kept, [subject.base, *(each.setting for each in chosen)], checking._logits(drafter),
                          lambda: None)
    return chosen, found


def test_the_reference_forward_gains_what_the_engine_gains(answers):
    model, drawn, config = answers
    _, (base,) = drafted_again(config, model, drawn)
    assert base.gained.tolist() == [gained for walk in drawn for gained in walk.gained]
    assert sum(map(len, (walk.gained for walk in drawn))) > 50
    assert base.gained.max() > 5


@pytest.mark.parametrize("name", PLANTS)
def test_the_alternative_puts_a_planted_mistake_right(name, answers, tmp_path):
    model, drawn, _ = answers
    plant = PLANTS[name]
    config = composed(tmp_path, *BASE, *overrides(plant, tmp_path))
    settings, (base, *found) = drafted_again(config, model, drawn, plant.kind, plant.name)
    trials = [checking.tried(each, blocks, base, len(drawn)) for each, blocks in zip(settings, found, strict=True)]
    assert len(trials) == 1
    healthy = checking.estimate(checking.of_walks(drawn)).known
    assert trials[0].tau.known > (0.9 if plant.kind != "layout" else 0.8) * healthy
    assert trials[0].base_tau < 0.95 * trials[0].tau.known
    assert plant.says.split(" in")[0] in checking._sentence(trials[0], checking.slots(base))
    if plant.kind == "dtype":
        assert base.not_numbers == len(base.gained)
        assert not base.right.any()


def trial(tau: float, base: float, error: float, kind: str = "layers", cause: str = "it is reversed",
          step: int = 0) -> Trial:
    change = tau - base
    return Trial(kind, "name", cause, IntervalEstimate(tau, tau - error, tau + error, 90), base,
                 IntervalEstimate(change, change - 1.96 * error, change + 1.96 * error, 90), step=step)


def estimate(value: float, half: float) -> IntervalEstimate:
    return IntervalEstimate(value, value - half, value + half, 100)


OTHER = [Difference("model.chat was true in training"), Difference("the target's weights are others", of_target=True)]
SLOTS = [{"slot": 1, "right": 0.1, "shift +1": 0.61, "shift -1": 0.02},
         {"slot": 2, "right": 0.1, "shift -1": 0.5, "shift +1": 0.1}]


@pytest.mark.parametrize(("outcome", "says", "case"), [
    ("healthy", "no known mistake", {}),
    ("healthy", "expected 4.2", {"expected": 4.2}),
    ("healthy", "no known mistake", {"differences": OTHER[:1]}),
    ("below", "less than the expected 6", {"expected": 6.0}),
    ("below", "the target's weights", {"expected": 6.0, "differences": OTHER}),
    ("other_target", "--trained-for", {"differences": OTHER}),
    ("healthy", "expected 4.2", {"expected": 4.2, "differences": OTHER}),
    ("wide", "at least 8", {"problems": 7}),
    ("wide", "take about 45 problems", {"tau": estimate(4.0, 1.0), "problems": 16}),
    ("cause", "it is reversed", {"trials": [trial(4.4, 4.0, 0.1)]}),
    ("cause", "it is reversed", {"trials": [trial(4.4, 4.0, 0.1), trial(4.3, 4.0, 0.01, cause="another")]}),
    ("healthy", "no known mistake", {"trials": [trial(4.4, 4.0, 0.12)]}),  # 3.3 standard errors
    ("healthy", "no known mistake", {"trials": [trial(4.15, 4.0, 0.001)]}),  # 4 per cent
    ("healthy", "no known mistake", {"trials": [trial(4.5, 4.0, 0.01, kind="block")]}),
    ("cause", "slot 1 predicts the token of slot 2 in 61% and its own in 10%: off by one",
     {"trials": [trial(4.4, 1.0, 0.1, "layout", "off by one", 1)]}),
    ("cause", "slot 2 predicts the token of slot 1 in 50%", {"trials": [trial(4.4, 1.0, 0.1, "layout", "off", -1)]}),
    ("cause", "in the engine", {"reference": "the mistake is in the engine"}),
])
def test_verdict(outcome, says, case):
    given = {"tau": estimate(4.0, 0.3), "problems": 20, "trials": [], "slot_rows": SLOTS, "expected": None, "differences": [],
             "reference": None, **case}
    found = checking.verdict(**given)
    assert found.outcome == outcome
    assert says in found.sentence


def test_changes_that_gain_the_same_are_named_together():
    trials = [trial(4.4, 1.5, 0.1), trial(4.38, 1.5, 0.1), trial(3.0, 1.5, 0.1)]
    found = checking.verdict(estimate(1.5, 0.1), 20, trials, SLOTS, None, [], None)
    assert found.sentence.endswith("not told apart from name")


def test_a_paired_change_has_a_narrower_interval_than_its_parts():
    tokens, forwards = np.arange(20.0) + 20.0, np.full(20, 10.0)
    found = checking.trial("layers", "name", "", Ratio(tokens + 1.0, forwards), Ratio(tokens, forwards))
    assert found.change.interval == pytest.approx((0.1, 0.1))
    assert found.tau.interval[1] - found.tau.interval[0] > 0.3


@pytest.fixture
def measured() -> Checked:
    row, empty = Row("as given", estimate(1.1, 0.1)), Row("a system turn", IntervalEstimate(None, None, None, 0), "the same")
    slots = [{"slot": 1, "blocks": 3, "right": 0.5, "shift +1": None, "shift -1": 0.25}]
    return Checked("tiny x", "tiny", 9, 4.8, ["model.chat was true"], [row], [row, empty], slots, 1.0,
                   [trial(4.4, 1.1, 0.1), trial(1.0, 1.1, 0.1)], ["precision: no"],
                   checking.DraftVerdict("cause", "it is reversed"))


def test_report_has_a_text_a_figure_and_json(measured, tmp_path):
    text = report.text(measured)
    for part in ("cause: it is reversed", "1.10 [1.00, 1.20]", "helps", "not tried: precision: no", "model.chat was true",
                 "50%"):
        assert part in text
    report.write(measured, tmp_path / "out")
    values = json.loads((tmp_path / "out/check.json").read_text())
    assert (values["outcome"], values["alternatives"][0]["helps"], values["templates"][1]["tau"]) == ("cause", True, None)
    assert (tmp_path / "out/check.png").stat().st_size > 10_000


@pytest.mark.parametrize(("arguments", "says"), [
    (["look"], "allowed: check, speed"), (["speed", "--expected=3"], "not an option"),
    (["speed", "draft=none"], "draft: given 'none'; allowed: a draft, such as tiny"),
    (["speed", "draft=tiny", "decoder=plain"], "decoder: given 'plain'; allowed: speculative_match"),
    (["speed", "draft=tiny", "decoder.trace=true"], "decoder.trace: given True; allowed: false with drafts speed, which"),
    (["speed", "draft=tiny", "draft.adapt=online"], "draft.adapt: given 'online'; allowed: none with drafts speed: a"),
    (["check", "draft=tiny", "draft.adapt=context"], "draft.adapt: given 'context'; allowed: none with drafts check: a draft"),
    (["check", "--expected=inf", "draft=tiny"], "--expected: given inf; allowed: a finite number >= 1"),
    (["speed", "sampler=greedy"], "sampler: given with drafts speed; allowed: model"), (["check", "--wrong"], "not an option"),
    (["check", "--expected=0.5", "draft=tiny"], ">= 1"),
    (["check", "sampler=greedy"], "sampler: given with drafts check; allowed: model"),
    (["check", "model=tiny", "draft=tiny", f"--out={__file__}"], "a file; allowed: a folder"),
    (["check", "decoder.trace=false"], "decoder.trace: given with drafts check"),
    (["check", "draft=tiny", "dataset.limit=2,3"], "several values"),
    (["check", "draft=tiny", "--trained-for=absent/folder/here"], "model.path"),
])
def test_a_wrong_command_line_is_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")


def test_a_draft_without_a_network_is_refused(tmp_path):
    with pytest.raises(UserError, match="a draft with a checkpoint"):
        check(composed(tmp_path, *BASE, "draft=ngram"))


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


def test_the_record_of_the_training_is_compared_with_the_target(tmp_path):
    config = composed(tmp_path, *BASE, "draft=tiny")
    same, other = config.model.weights_fingerprint(), config.model.fingerprint()
    assert checking._differences(config, {"model.weights": same, "model.content": other}) == []
    for record, says in (({"model.content": "another"}, "the target's files (weights, configuration"),
                         ({"model.weights": "another", "model.content": "another"}, "the target's weights are not"),
                         ({"model.weights": same, "model.content": "another"}, "another file of their folder"),
                         ({"model.chat": False}, "model.chat was false in training and is true here")):
        (difference,) = checking._differences(config, record)
        assert says in difference.clause
    # Only other weights, or files among which they may be, make another target of it.
    of_configuration = checking._differences(config, {"model.weights": same, "model.content": "another"})
    assert checking.verdict(estimate(4.0, 0.3), 20, [], SLOTS, None, of_configuration, None).outcome == "healthy"


def test_what_the_record_states_is_expected():
    assert checking._stated({"held_out_tau": 2.5}) == 2.5
    assert checking._stated({"held_out_tau": "much"}) is None


WHOLE = ("sampler=greedy", "decoder=speculative_match", "decoder.trace=true", "dataset.limit=24", "dataset.max_new_tokens=64")


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["tiny", "tiny_dspark", "tiny_dflash2"])
def test_a_healthy_pair_is_healthy(draft, tmp_path):
    config = composed(tmp_path, *WHOLE, f"draft={draft}")
    found = check(config)
    assert found.verdict.outcome == "healthy", found.verdict
    assert found.agreement == 1.0
    assert found.differences == []
    assert [row.tau.value is not None for row in found.templates] == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_named(name, tmp_path):
    plant = PLANTS[name]
    found = check(composed(tmp_path, *WHOLE, *overrides(plant, tmp_path)))
    assert found.verdict.outcome == "cause", found.verdict
    assert plant.says in found.verdict.sentence


@pytest.mark.slow
@pytest.mark.parametrize("given", TEMPLATES)
def test_another_template_is_named(given, tmp_path):
    found = check(composed(tmp_path, *WHOLE, "draft=tiny", given))
    assert f"it accepts more with {TEMPLATES[given]}" in found.verdict.sentence
    assert bool(found.differences) == given.startswith("model.")


@pytest.mark.slow
def test_features_after_the_final_norm_are_named(tmp_path, answers):
    model, drawn, _ = answers
    reading = sequences.read(model, torch.from_numpy(drawn[0].sequence)[None], (1, 2, 3, 4, 5))
    rms = torch.stack([output.pow(2).mean(dim=-1).sqrt()[0, 5:].median() for output in reading.outputs])
    target = plants.planted(tmp_path / "target", "tiny", plants.top(tie_word_embeddings=False), plants.other_head)
    plant = Plant("norm", "", "", tensors=plants.expects_normed(rms))
    found = check(composed(tmp_path, *WHOLE, *overrides(plant, tmp_path), "model=hf", f"model.path={target}"))
    assert "trained with features after the target's final norm" in found.verdict.sentence


@pytest.mark.slow
def test_the_head_of_another_model_is_named(tmp_path):
    target = plants.planted(tmp_path / "target", "tiny", plants.top(tie_word_embeddings=False), plants.other_head)
    config = composed(tmp_path, *WHOLE, "draft=tiny", "model=hf", f"model.path={target}")
    alone = check(config)
    assert alone.verdict.outcome == "other_target"
    other = dataclasses.replace(config.model, path=composed(tmp_path).model.path)
    assert "trained with the head of the other model" in check(config, other=other).verdict.sentence


@pytest.mark.slow
def test_a_mistake_of_the_engine_is_told_from_one_of_the_checkpoint(tmp_path, monkeypatch):
    absorb = DFlashDrafter.absorb
    monkeypatch.setattr(DFlashDrafter, "absorb", lambda self, cache, rows, tokens, positions, features: absorb(
        self, cache, rows, tokens, positions, [feature.flip(-1) for feature in features]))
    found = check(composed(tmp_path, *WHOLE, "draft=tiny"))
    assert found.verdict.outcome == "cause"
    assert "in the engine" in found.verdict.sentence
