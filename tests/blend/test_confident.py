"""`blend=confident`: the law by enumeration, the engine against two references, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dflash_mcmc.blend.confident import ConfidentBlend
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.errors import UserError
from dflash_mcmc.rng import Key
from tests.blend.exact import check_chain, check_decoder, check_draws, check_power, speculation
from tests.engine.batching.test_batched import PROMPTS, SAMPLERS, STOPS, run_batched, same_as_reference
from tests.laws import MostConfident
from tests.sampler import test_draft_refine as of_draft_refine
from tests.targets import RememberingReference, random_model

NAMES = ("tapped", "tapped 1", "tapped 2")
BLENDS = {"alone": (1.0, "none"), "normed": (0.6, "final"), "away": (-0.5, "none")}


def tables(name: str, size: int = 3, draft=None, speculation=None) -> tuple[TabularEngine, MostConfident]:
    """An engine with three layers before the last, and its blend as the laws by hand take it."""
    beta, norm = BLENDS[name]
    model = TabularModel(size, (0,), seed={3: 3, 2: 7}[size], scale=0.5, num_layers=4)
    return (TabularEngine(model, ConfidentBlend(beta=beta, norm=norm), speculation, draft), MostConfident(beta, NAMES, norm))


@pytest.mark.parametrize("name", BLENDS)
def test_temperature_and_best_of_n_have_the_law_by_hand(name):
    engine, blend = tables(name)
    shorter = [blend._replace(names=NAMES[first:]) for first in (1, 2, 3)]
    check_draws(engine, blend, (blend._replace(beta=blend.beta / 2), *shorter, blend._replace(names=NAMES[::-1])))


@pytest.mark.parametrize("name", BLENDS)
def test_the_samplers_of_the_power_target_are_exact(name):
    engine, blend = tables(name)
    check_power(engine, tables(name, size=2)[0], blend)


def test_draft_refine_is_exact():
    engine, blend = tables("normed", draft=TabularDraft(3, 2, seed=7, scale=0.7))
    check_chain(engine, blend, of_draft_refine.make(cut="confidence"))


def test_a_decoder_changes_no_law():
    check_decoder(*tables("alone", speculation=speculation("rejection")))


@pytest.mark.parametrize(("blend", "sampler"), [
    (ConfidentBlend(), "power_mh_early"), (ConfidentBlend(beta=0.5, layers=[0, 1], norm="none"), "power_mh")])
def test_batched_is_reference(blend, sampler):
    model = random_model("qwen3")
    reference = RememberingReference(model, LanguageModel(model, stop_ids=STOPS), blend)
    same_as_reference(run_batched(model, SAMPLERS[sampler], blend), SAMPLERS[sampler], reference)


@torch.inference_mode()
def test_greedy_tokens_are_those_of_a_plain_loop_on_transformers():
    """200 tokens: entropies of `hidden_states` after the norm, from the last layer backwards; the choice has effects."""
    model, taken, changed = random_model("qwen3", 1.0, num_hidden_layers=6, max_position_embeddings=320), set(), 0
    tokens = PROMPTS[0].tolist()
    for _ in range(200):
        output = model(torch.tensor([tokens]), output_hidden_states=True)
        found = [output.logits[0, -1].double()]  # of the last layer, and then of those before it
        found += [model.lm_head(model.model.norm(output.hidden_states[entry][0, -1])).double() for entry in range(5, 0, -1)]
        entropies = [float(torch.distributions.Categorical(logits=logits).entropy()) for logits in found]
        place = 0
        while place < 5 and entropies[place + 1] < entropies[place]:
            place += 1
        taken, best = taken | {place}, int(found[place].argmax())
        changed += best != int(found[0].argmax())
        tokens.append(best)
    engine = BatchedEngine(LanguageModel(model).without_stops(), ConfidentBlend(), 3, 320)
    drawn = {done.tag: done.result.trajectory for done in engine.run(
        [(tag, SAMPLERS["greedy"].chain(prompt, 200, Key(0))) for tag, prompt in enumerate(PROMPTS[:2])])}
    assert drawn[0].tokens.tolist() == tokens[len(PROMPTS[0]) :]
    assert len(taken) > 2
    assert changed > 5


def test_the_most_confident_layer_by_hand():
    """Two tokens in a batch: the entropy does not fall for the first, which stays, and the second goes to the first layer."""
    sure, unsure, flat = [0.0, 4.0], [0.0, 1.0], [0.0, 0.0]
    last, layers = [flat, flat], [[sure, sure], [flat, unsure]]
    assert ConfidentBlend().mix(torch.tensor(last), list(map(torch.tensor, layers)), None).tolist() == [flat, sure]


def test_a_layer_without_numbers_leaves_none():
    last, layer = torch.zeros(2, 3), torch.eye(3)[:2]
    layer[1, 0] = torch.nan
    mixed = ConfidentBlend().mix(last, [layer], None)
    assert mixed[0].isfinite().all()
    assert mixed[1].isnan().any()


GIVEN = ("blend=confident", "sampler=temperature")


def test_candidates_are_the_ten_layers_before_the_last_unless_given(make_config):
    assert ConfidentBlend().tapped_layers(28) == tuple(range(17, 27))
    assert ConfidentBlend().tapped_layers(8) == tuple(range(7))
    config = make_config(*GIVEN)
    assert (config.blend.beta, config.blend.alpha_mask, config.blend.norm) == (1.0, 0.0, "final")
    assert len({identity_hash(make_config(*GIVEN, f"blend.layers={given}")) for given in ("[-2,0]", "[0,6]")}) == 1
    for given in ("[]", "[-1]", "[1,1]", "[7]"):
        with pytest.raises(UserError, match=r"blend.layers: given \[.*\]; allowed: one and more different layers from -8 to"):
            make_config(*GIVEN, f"blend.layers={given}")
