"""Steps with a draft have as many rows as chains and the bits of padded ones, where a comparison on this machine says so."""

from __future__ import annotations

import functools

import pytest
import torch

from dflash_mcmc.api.choices import component
from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.engine.batching import batched
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import NgramDrafter, SelfDrafter
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.greedy import Greedy
from tests.bench.subject import subject_of
from tests.cases import quick
from tests.engine.batching.test_batched import power_mh, temperature
from tests.engine.speculative.test_block_grid import draft_mh
from tests.engine.speculative.test_speculator import match, reject

HORIZON = 20
SAMPLERS = {"greedy": Greedy(alpha=1.0), "temperature": temperature(), "power_mh": power_mh(),
            "penalised": temperature(temperature=0.7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3)}
DECODERS = {"match": match(), "match_drawn": match(0.7), "reject": reject(), "reject_block": reject(verification="block")}


@pytest.fixture(scope="module")
def embedded():
    return subject_of("tiny", 24)


@functools.cache
def draft(model, name: str, block_size: int):
    if name in ("self", "ngram"):
        return {"self": SelfDrafter(block_size - 1), "ngram": NgramDrafter(block_size - 1, 2)}[name]
    fields = {"block_size": block_size} if name == "dflash" else {}
    return component("draft", "tiny" if name == "dflash" else f"tiny_{name}", **fields).load(model)


def records(engine: BatchedEngine, prompts, sampler, chains: int = 3) -> list:
    """Tokens, log p, log q and intervals of chains in the order of their numbers."""
    done = engine.run((number, sampler.chain(prompts[number % len(prompts)], HORIZON, Key(number)))
                      for number in range(chains))
    results = [chain.result.trajectory for chain in sorted(done, key=lambda chain: chain.tag)]
    return [(t.tokens.tolist(), t.log_p.tolist(), t.log_q.tolist(), t.interval.tolist()) for t in results]


def engine_of(subject, slots: int, drafter, decoder=None, blend=None, **options) -> BatchedEngine:
    longest = max(map(len, subject.prompts[:3]))
    speculation = decoder.speculation(drafter) if decoder else None
    return BatchedEngine(subject.model, blend, slots, longest + HORIZON, Options(**options), longest, speculation,
                         None if decoder else drafter)


def is_the_same(subject, sampler, slots: int, drafter, decoder=None, blend=None, **options) -> None:
    """The records of steps with any number of rows are those of padded steps."""
    on = engine_of(subject, slots, drafter, decoder, blend, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "free_rows", lambda *given: False)
        off = engine_of(subject, slots, drafter, decoder, blend, **options)
    assert off._loop._ladder.row_step == 8
    assert records(on, subject.prompts[:3], sampler) == records(off, subject.prompts[:3], sampler)


@pytest.mark.parametrize(("decoder", "name", "slots", "block_size"), quick([
    ("match", "greedy", 1, 3), ("match", "penalised", 3, 8), ("match_drawn", "power_mh", 1, 5),
    ("reject", "temperature", 1, 8), ("reject", "power_mh", 2, 3), ("reject_block", "penalised", 1, 2),
    ("reject_block", "temperature", 7, 5)], ("match", "penalised", 3, 8), ("reject_block", "temperature", 7, 5)))
def test_speculative_records_are_the_same_to_the_last_bit(embedded, decoder, name, slots, block_size):
    drafter = draft(embedded.model, "dflash", block_size)
    is_the_same(embedded, SAMPLERS[name], slots, drafter, DECODERS[decoder])


@pytest.mark.parametrize("name", quick(["self", "ngram", "dspark", "dflash2"], "dspark"))
def test_other_drafts_have_the_same_records(embedded, name):
    is_the_same(embedded, SAMPLERS["temperature"], 2, draft(embedded.model, name, 4), match(0.7))


@pytest.mark.parametrize(("sampler", "slots"), [pytest.param(draft_mh(), 1, id="draft", marks=pytest.mark.slow),
                                                pytest.param(draft_mh(proposal="mixture"), 3, id="mixture")])
def test_draws_from_the_draft_are_the_same_to_the_last_bit(embedded, sampler, slots):
    is_the_same(embedded, sampler, slots, draft(embedded.model, "dflash", 5))


@pytest.mark.parametrize("sampler", [
    draft_mh(), *(pytest.param(sampler, marks=pytest.mark.slow) for sampler in (SAMPLERS["penalised"], power_mh()))])
def test_a_blend_with_the_draft_is_the_same_to_the_last_bit(embedded, sampler):
    is_the_same(embedded, sampler, 2, draft(embedded.model, "dflash", 4), blend=DraftBlend(beta=0.4))


def steps_of(model, name: str = "dflash", block_size: int = 3, rule=rules.match) -> batched.EngineSteps:
    return batched.EngineSteps(draft(model, name, block_size), rule)


@pytest.mark.parametrize("name", ["dflash", "self", "ngram"])
def test_a_round_has_as_many_rows_as_chains_where_the_bits_allow_it(embedded, name, monkeypatch):
    fed, forward = [], ModelRunner.forward

    def counted(self, cache, rows, tokens, *rest, **named):
        fed.append(tuple(tokens.shape))
        return forward(self, cache, rows, tokens, *rest, **named)

    drafter, decoder = draft(embedded.model, name, 3), match()
    steps = batched.EngineSteps(drafter, decoder.speculation(drafter).rule)
    free = batched.free_rows(embedded.model, steps, batched.ATTENTION)
    for allowed in (free, False):
        monkeypatch.setattr(batched, "free_rows", lambda *given, allowed=allowed: allowed)
        engine = engine_of(embedded, 1, drafter, decoder)
        monkeypatch.setattr(ModelRunner, "forward", counted)
        fed.clear()
        list(engine.run([(0, SAMPLERS["greedy"].chain(embedded.prompts[0][:65], 8, Key(0)))]))
        monkeypatch.undo()
        # The prompt is read in one piece of 64 tokens.
        assert {rows for rows, queries in fed if queries in (1, 3)} == {1 if allowed else 8}
        assert any(queries == 3 for _, queries in fed)


def test_a_draft_that_keeps_its_layers_is_padded(embedded, monkeypatch):
    drafter = draft(embedded.model, "dflash", 3)
    assert batched.fits(embedded.model, drafter)
    monkeypatch.setattr(batched, "has_row_layers", lambda network: network is not drafter.network)
    assert not batched.fits(embedded.model, drafter)


def agreeing(subject) -> batched.EngineSteps:
    steps = steps_of(subject.model)
    if not batched.free_rows(subject.model, steps, batched.ATTENTION):
        pytest.skip("this processor gives fewer rows other bits: steps are padded to eights here")
    return steps


@pytest.mark.parametrize("where", ["verification", "draft"])
@torch.inference_mode()
def test_another_product_is_found_out(embedded, where, monkeypatch):
    """A last bit of one layer is enough. The layer is the target's last one, or the draft's."""
    steps = agreeing(embedded)
    holder, name, few = steps.drafter.network.layers[-1].mlp.down_proj, "forward", 1
    if where == "verification":  # the loop of layers pads one row to a few
        holder, name, few = embedded.model._loop._layers[-1], "_down", 4
    own = getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda rows: (
        torch.nextafter(own(rows), torch.tensor(torch.inf)) if len(rows) <= few else own(rows)))
    assert not batched.steps_agree(embedded.model, steps)


@torch.inference_mode()
def test_attention_of_fewer_slots_with_other_bits_is_found_out(embedded, monkeypatch):
    from dflash_mcmc.engine.batching import attention

    steps, own = agreeing(embedded), attention.grouped_attention

    def other(module, query, *rest, **kwargs):
        mixed, weights = own(module, query, *rest, **kwargs)
        return (mixed if len(query) == batched.ROWS else torch.nextafter(mixed, torch.tensor(torch.inf))), weights

    monkeypatch.setattr(attention, "grouped_attention", other)  # the draft calls it by this name
    assert not batched.steps_agree(embedded.model, steps)


def test_a_rule_that_depends_on_the_number_of_blocks_is_found_out(embedded):
    kept = []

    def rule(block, chance):
        verdict = rules.match(block, chance)
        kept.append(verdict.accepted[0])
        return verdict._replace(accepted=verdict.accepted * (len(block.drafted) == batched.ROWS))

    assert batched.draws_agree(512, steps_of(embedded.model))
    assert not batched.draws_agree(512, steps_of(embedded.model, rule=rule))
    assert max(kept) > 0
