"""The configuration of a draft's training: every mistake is an error of one line before a model is loaded. And the command."""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch

from dflash_mcmc.forcing import sequences
from dflash_mcmc.train.draft import questions
from dflash_mcmc.train.loss import CandidateIds, Epochs, KeptReader, Objective, Response, gather, loss_sum, read_target
from dflash_mcmc.train.recipe import DraftPlan, compose, identity_of, run_folder
from tests.refusals import refused
from tests.train.drafts import random_draft, random_responses, random_target


@pytest.mark.parametrize(("overrides", "message"), [
    (["steps=-1"], "steps: given -1; allowed: a whole number >= 0"),
    (["target=p_alpha", "alpha=0"], "alpha: given 0.0; allowed: a number > 0"),
    (["shape.block_size=1"], "shape.block_size: given 1; allowed: a whole number >= 2"),
    (["shape.block_size=12"], "loss_gamma: given None; allowed: a number > 0"),
    (["shape.num_features=6"], "shape.num_features: given 6; allowed: at most 5 for a target of 8 layers"),
    (["responses.temperatures=[1,-1]"], "responses.temperatures: given [1.0, -1.0]; allowed: a list, each 0 or a number from"),
    (["responses.held_out=[1e-7]"], "responses.held_out: given [1e-07]; allowed: a list, each 0 or a number from 1e-06"),
    ([f"export={__file__}"], "allowed: a folder, not a file or below one"),
    ([f"export={__file__}/draft"], "allowed: a folder, not a file or below one"),
    (["responses.held_out=[]"], "responses.held_out: given []"),
    (["prompts.template=hello"], "prompts.template: given 'hello'; allowed: a text with {question} in it"),
    (["prompts.path=/no/such/file"], "prompts.path: given '/no/such/file'; allowed: a JSON Lines or CSV file that exists"),
    (["prompts.num=null"], "prompts.num: given None; allowed: a whole number >= 1"),
])
def test_mistakes_are_errors_of_one_line(overrides, message):
    with refused(message):
        compose("tiny", overrides)


def test_any_target_needs_a_path_and_prompts():
    with refused("prompts.path: not given"):
        compose("dflash", ["model=qwen3_4b"])
    with refused("draft: given 'tny' (did you mean 'tiny'?); allowed: 'tiny', 'smollm2', 'qwen2_5_coder_0_5b', 'dflash'"):
        compose("tny", [])


def test_published_recipe(tmp_path):
    (tmp_path / "questions.jsonl").write_text("{}\n")
    plan = compose("dflash", ["model=qwen3_4b", f"prompts.path={tmp_path / 'questions.jsonl'}"])
    assert (plan.anchors, plan.shape.block_size, plan.learning_rate, plan.warmup_fraction) == (512, 16, 6e-4, 0.04)
    assert (plan.target, plan.precision) == ("tokens", "bfloat16")
    assert [compose("tiny", [f"shape.block_size={n}"]).gamma for n in (16, 10, 8)] == [7, 5, 4]
    assert compose("tiny", ["shape.block_size=12", "loss_gamma=3"]).gamma == 3


def changed(plan: DraftPlan, name: str, value: object) -> DraftPlan:
    plan = copy.deepcopy(plan)
    parent, _, last = name.rpartition(".")
    setattr(getattr(plan, parent) if parent else plan, last, value)
    return plan


def test_identity_has_all_that_determines_the_weights(tmp_path):
    plan = compose("tiny", ["shape.block_size=16"])
    base = identity_of(plan)
    for name, value in (("seed", 1), ("shape.num_layers", 7), ("prompts.num", 9), ("responses.temperatures", [0.5]),
                        ("target", "p"), ("anchors", 3), ("prompt_end", False), ("loss_gamma", 3.0), ("model.chat", False)):
        assert identity_of(changed(plan, name, value)) != base, name
    for name, value in (("num_threads", 1), ("evaluate_every", 7), ("export", "there"), ("rows_at_once", 2), ("alpha", 2.0),
                        ("loss_gamma", 7.0), ("hardware.num_slots", 3)):
        assert identity_of(changed(plan, name, value)) == base, name
    sharp = changed(plan, "target", "p_alpha")
    assert identity_of(changed(sharp, "alpha", 2.0)) != identity_of(sharp)
    assert run_folder(plan).name.startswith("draft-")
    file, identities = tmp_path / "questions.jsonl", []
    for text in ("one", "two"):
        file.write_text(json.dumps({"question": text}) + "\n")
        identities.append(identity_of(changed(plan, "prompts.path", str(file))))
    assert identities[0] != identities[1]


def test_generated_questions_differ_from_held_out_ones():
    plan = compose("tiny", ["prompts.num=40", "prompts.held_out=10"])
    made = questions(plan)
    assert (len(made.training), len(made.held_out)) == (40, 10)
    assert len(set(made.training) | set(made.held_out)) == 50
    assert questions(compose("tiny", ["prompts.num=50", "prompts.held_out=10"])).training[:40] == made.training


def test_questions_of_a_file(tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"problem": f"question {n}"}) + "\n" for n in range(9)))
    given = [f"prompts.path={file}", "prompts.field=problem", "prompts.held_out=2", "prompts.num=null", "batch_size=3"]
    assert questions(compose("tiny", given)).training == [f"question {n}" for n in range(7)]
    assert questions(compose("tiny", [*given, "prompts.num=4"])).held_out == ["question 7", "question 8"]
    for override, message in (("prompts.num=8", "prompts.num: given 8; allowed: at most 7"),
                              ("prompts.held_out=9", "prompts.held_out: given 9; allowed: at most 8"),
                              ("prompts.field=question", f"prompts.path: {file}: line 1 lacks the field 'question'"),
                              ("batch_size=8", "batch_size: given 8; allowed: at most 7")):
        with refused(message):
            questions(compose("tiny", [*given, override]))
    # A question that is held out is not trained on.
    file.write_text("".join(json.dumps({"problem": f"question {n % 4}"}) + "\n" for n in range(9)))
    made = questions(compose("tiny", given))
    assert (made.training, made.held_out) == ([f"question {n}" for n in (1, 2, 1, 2)], ["question 3", "question 0"])
    assert "prompts.path: 3 lines are not trained on, since they equal held-out ones" in capsys.readouterr().err
    with refused("prompts.num: given 5; allowed: at most 4 of the file's 9 lines"):
        questions(compose("tiny", [*given, "prompts.num=5"]))
    # The separators of lines of Unicode are characters of a text, and an empty line is no row.
    file.write_text("\n".join(json.dumps({"problem": f"a\u2028b {n}"}, ensure_ascii=False) + "\n" for n in range(5)), "utf-8")
    assert questions(compose("tiny", given)).training == [f"a\u2028b {n}" for n in range(3)]
    for content, message in ((b'{"problem": "\xff"}\n', "prompts.path: cannot read"),
                             (b'{"problem": 3}\n', "prompts.field: given")):
        file.write_bytes(content)
        with refused(message):
            questions(compose("tiny", given))


# A loss over some ids: with all ids it is the loss itself, and with random ones the sum over the vocabulary has no bias.

OBJECTIVES = pytest.mark.parametrize("objective", [Objective(name, 3.0, 2.0) for name in ("tokens", "p", "p_alpha")],
                                     ids=lambda objective: objective.target)


@pytest.fixture(scope="module")
def target():
    return random_target()


def forbidden_of(target) -> np.ndarray:
    return target.forbidden.numpy()


def few() -> list[Response]:
    """Answers of the ids 4 (most often), 5 and 6 after prompts with other ids."""
    return [Response(np.array([1, 2, 4, 4, 4, 5], np.int32), 2), Response(np.array([1, 3, 4, 5, 6, 4], np.int32), 2)]


@OBJECTIVES
def test_all_ids_as_candidates_give_the_loss_over_all_ids(target, objective):
    draft, answers = random_draft(target), [Response(np.arange(58, dtype=np.int32), 4)]
    blocks = gather(answers, [np.array([4, 9, 30, 55])])
    every = CandidateIds(answers, 200, forbidden_of(target), 0)(0, blocks.tokens)
    assert (len(every.ids), every.num_certain) == (58, 58)
    ours = loss_sum(draft, target, blocks, objective, False, every)
    theirs = loss_sum(draft, target, blocks, objective, False)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for mine, other in zip(*(torch.autograd.grad(value, list(draft.parameters())) for value in (ours, theirs)), strict=True):
        assert torch.allclose(mine, other, atol=1e-5 * other.abs().max())


def test_the_sum_over_candidates_has_no_bias(target):
    candidates = CandidateIds(few(), 12, forbidden_of(target), 3)
    hidden = 0.2 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weight = target.head.weight.detach()
    exact = (hidden @ weight[:58].T).exp().sum(dim=-1)  # the last three ids have no token
    sums = torch.stack([candidates(step, torch.tensor([7, 8])).logits(hidden, weight, None).exp().sum(dim=-1)
                        for step in range(2000)])
    error = sums.std(dim=0) / len(sums) ** 0.5
    assert (error < 0.02 * exact).all()
    assert ((sums.mean(dim=0) - exact).abs() < 4 * error).all()


def test_candidates_are_the_steps_ids_the_frequent_ones_and_others_from_outside(target):
    candidates = CandidateIds(few(), 5, forbidden_of(target), 3)
    one, same, other = (candidates(step, torch.tensor([[9, 8], [9, 0]])) for step in (7, 7, 8))
    assert one.ids[: one.num_certain].tolist() == [0, 4, 5, 8, 9]  # 4 and 5 are the two most frequent ids of the answers
    outside = one.ids[one.num_certain :].tolist()
    assert len(outside) == 3
    assert not set(outside) & {0, 4, 5, 8, 9, 58, 59, 60}
    assert torch.equal(one.ids, same.ids)
    assert not torch.equal(one.ids, other.ids)
    assert one.places(torch.tensor([9, 0, 5])).tolist() == [4, 0, 2]


# What is kept is that of a reading, responses of similar length are read together, once, and losses with them agree.

@pytest.mark.parametrize("name", ["tokens", "p_alpha"])
def test_losses_with_kept_features_are_those_of_a_reading(monkeypatch, name):
    target, answers, reads = random_target(), random_responses((13, 9, 27)), []
    draft, objective = random_draft(target), Objective(name, 3.0, 2.0)
    reader, read = partial(read_target, target, draft.shape.target_layers, power=objective.power), sequences.read

    def counted(model, tokens, layers):
        reads.append(tokens.shape)
        return read(model, tokens, layers)

    monkeypatch.setattr(sequences, "read", counted)
    kept, first = KeptReader(reader, answers, 2, target.device), None
    monkeypatch.setattr(sequences, "read", read)
    for numbers in ([0, 1], [2, 0], [1, 2, 0], [0, 1]):
        blocks = gather([answers[n] for n in numbers], [np.array([4, 6]) for _ in numbers])
        known = kept(numbers)
        ours = loss_sum(draft, target, blocks, objective, False, None, known).item()
        assert ours == pytest.approx(loss_sum(draft, target, blocks, objective, False).item(), rel=1e-5)
        first = known if first is None else first
    assert torch.equal(known.features, first.features)
    assert reads == [(2, 13), (1, 27)]


def test_the_numbers_of_a_step_are_those_of_its_blocks():
    answers = random_responses(tuple(range(8, 20)))
    batches = Epochs(answers, 3, 2, False, seed=5)
    for step in range(9):
        blocks, numbers = batches(step), batches.indices(step)
        assert [answers[number].length for number in numbers] == blocks.lengths.tolist()


def test_help_lists_the_fields(command, tmp_path):
    done = command("dflash_mcmc.train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m dflash_mcmc.train draft=tiny" in done.stdout
    assert "responses.max_new_tokens" in done.stdout
    assert "whole number >= 2; default 2048: maximal length of a response in tokens" in done.stdout
    assert list(tmp_path.iterdir()) == []
