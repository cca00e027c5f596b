"""`blend=dola`: the law by enumeration, the engine against two references, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.blend.dola import DolaBlend
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.rng import Key
from tests.blend.exact import check_chain, check_decoder, check_draws, check_power, speculation
from tests.engine.batching.test_batched import PROMPTS, SAMPLERS, STOPS, run_batched, same_as_reference
from tests.laws import Farthest
from tests.sampler import test_draft_refine as of_draft_refine
from tests.targets import RememberingReference, random_model

NAMES = ("tapped", "tapped 1", "tapped 2")
BLENDS = {"away": (-0.7, 0.0), "towards": (0.4, 0.0), "masked": (-0.7, 0.4)}


def tables(name: str, size: int = 3, draft=None, speculation=None) -> tuple[TabularEngine, Farthest]:
    """An engine with three layers, and its blend as the laws by hand take it."""
    beta, mask = BLENDS[name]
    model = TabularModel(size, (0,), seed={3: 3, 2: 7}[size], scale=0.5, num_layers=3)
    blend = DolaBlend(beta=beta, alpha_mask=mask, layers=[0, 1, -1])
    return TabularEngine(model, blend, speculation, draft), Farthest(beta, NAMES, mask)


@pytest.mark.parametrize("name", BLENDS)
def test_temperature_and_best_of_n_have_the_law_by_hand(name):
    engine, blend = tables(name)
    check_draws(engine, blend, (blend._replace(beta=-blend.beta), *(blend._replace(names=(name,)) for name in NAMES)))


@pytest.mark.parametrize("name", BLENDS)
def test_the_samplers_of_the_power_target_are_exact(name):
    engine, blend = tables(name)
    check_power(engine, tables(name, size=2)[0], blend)


@pytest.mark.parametrize("name", ["away", "towards"])
def test_draft_refine_is_exact(name):
    engine, blend = tables(name, draft=TabularDraft(3, 2, seed=7, scale=0.7))
    check_chain(engine, blend, of_draft_refine.make(cut="confidence"))


def test_a_decoder_changes_no_law():
    check_decoder(*tables("masked", speculation=speculation("rejection")))


@pytest.mark.parametrize(("blend", "sampler"), [
    (DolaBlend(beta=-0.6, layers=[0, 1, 2]), "power_mh"), (DolaBlend(beta=0.4, layers=[0, -2]), "power_mh"),
    (DolaBlend(beta=-0.6, alpha_mask=0.05, layers=[0, 1]), "power_mh_early")])
def test_batched_is_reference(blend, sampler):
    model = random_model("qwen3")
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), blend)
    same_as_reference(run_batched(model, SAMPLERS[sampler], blend), SAMPLERS[sampler], reference)


@torch.inference_mode()
def test_greedy_tokens_are_those_of_a_plain_loop_on_transformers():
    """200 tokens with `output_hidden_states`, whose entry l + 1 is layer l; choice and mask have effects."""
    model, layers, beta = random_model("qwen3", 1.0, num_hidden_layers=6, max_position_embeddings=320), (0, 2, 4), -2.0
    tokens, taken, changed, masked = PROMPTS[0].tolist(), set(), 0, 0
    for _ in range(200):
        output = model(torch.tensor([tokens]), output_hidden_states=True)
        own = torch.log_softmax(output.logits[0, -1].double(), dim=-1)
        states = [output.hidden_states[layer + 1][0, -1] for layer in layers]
        others = [torch.log_softmax(model.lm_head(state).double(), dim=-1) for state in states]
        means = [((own.exp() + other.exp()) / 2).log() for other in others]
        apart = [sum(float((law.exp() * (law - mean)).sum()) for law in (own, other)) / 2
                 for other, mean in zip(others, means, strict=True)]
        place = int(np.argmax(apart))
        score = (1 - beta) * own + beta * others[place]
        best = int(score.masked_fill(own < own.max() + np.log(0.1), -torch.inf).argmax())
        taken, changed, masked = taken | {place}, changed + (best != int(own.argmax())), masked + (best != int(score.argmax()))
        tokens.append(best)
    blend = DolaBlend(beta=beta, alpha_mask=0.1, layers=list(layers))
    engine = BatchedEngine(LanguageModel(model).without_stops(), blend, 3, 320)
    found = {done.tag: done.result.trajectory for done in engine.run(
        [(tag, SAMPLERS["greedy"].chain(prompt, 200, Key(0))) for tag, prompt in enumerate(PROMPTS[:2])])}
    assert found[0].tokens.tolist() == tokens[len(PROMPTS[0]) :]
    assert len(taken) > 1
    assert changed > 5
    assert masked > 5


GIVEN = ("blend=dola", "sampler=temperature")


def test_candidates_are_every_second_layer_of_the_first_half_unless_given(make_config):
    assert DolaBlend().tapped_layers(28) == (1, 3, 5, 7, 9, 11, 13)
    assert DolaBlend(layers=[-1, 0]).tapped_layers(8) == (0, 7)
    config = make_config(*GIVEN)
    assert (config.blend.beta, config.blend.alpha_mask) == (-1.0, 0.1)
    same = {identity_hash(make_config(*GIVEN, f"blend.layers={given}")) for given in ("null", "[3,1]", "[-7,3]")}
    assert len(same) == 1
    for given in ("[]", "[1]", "[1,1]", "[0,8]"):
        with pytest.raises(UserError, match=r"blend.layers: given \[.*\]; allowed: two and more different layers from -8 "):
            make_config(*GIVEN, f"blend.layers={given}")


@pytest.mark.parametrize(("given", "line"), [
    (["blend=dola"], r"blend.alpha_mask: given 0.1; allowed: 0, or sampler.proposal=matched with sampler=power_mh"),
    ([*GIVEN, "engine=vllm"], r"blend: given 'dola'; allowed: one without second logits with engine=vllm, or engine=slots"),
])
def test_what_is_refused(make_config, given, line):
    with pytest.raises(UserError, match=line):
        make_config(*given)


def test_a_layer_without_numbers_leaves_none():
    """Such a chain ends; a step whose other layers are finite is no exception."""
    last, layers = torch.zeros(2, 3), [torch.eye(3)[:2], torch.eye(3)[:2]]
    for place in range(2):
        broken = [layer.clone() for layer in layers]
        broken[place][1, 0] = torch.nan
        mixed = DolaBlend(beta=-1.0, layers=[0, 1]).mix(last, broken, None)
        assert mixed[0].isfinite().all()
        assert mixed[1].isnan().any()


def test_the_plan_counts_the_logits_of_each_layer(make_config):
    """Those of the layers, the target's and the mixture, for each row and each token of a step."""
    steps = {}
    for given in ("none", "[0,1]", "[0,1,2,3,4]"):
        more = ["blend=none"] if given == "none" else [f"blend.layers={given}"]
        config = make_config(*GIVEN, *more, "hardware.num_slots=8", "hardware.device=cpu")
        shape = config.model.shape("cpu")
        steps[given] = slots.memory_plan(config, shape, 100, 50, None)[1].step
        assert steps[given] == slots.memory_plan(config, config.model.load("cpu"), 100, 50, None)[1].step
    copy = 8 * 4 * shape.vocab_size
    assert [steps[given] - steps["none"] for given in steps] == [0, 4 * copy, 7 * copy]
