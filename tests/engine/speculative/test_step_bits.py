"""Steps with a draft have as many rows as chains and the bits of padded ones, where a comparison on this machine says so."""

import functools

import pytest
import torch

from dflash_mcmc.api.choices import component
from dflash_mcmc.blend.draft import DraftBlend
from dflash_mcmc.engine.batching import attention, batched
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
            "penalised": temperature(temperature=0.7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3),
            "draft_mh": draft_mh(proposal="mixture")}
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


@pytest.mark.parametrize(("name", "block_size", "decoder", "sampler", "slots", "beta"), quick([
    ("dflash", 8, "match", "penalised", 3, None), ("dflash", 5, "match_drawn", "power_mh", 1, None),
    ("dflash", 3, "reject", "temperature", 2, None), ("dflash", 5, "reject_block", "penalised", 7, None),
    ("self", 4, "match_drawn", "temperature", 2, None), ("ngram", 4, "match_drawn", "temperature", 2, None),
    ("dspark", 4, "match_drawn", "temperature", 2, None), ("dflash2", 4, "match_drawn", "temperature", 2, None),
    ("dflash", 5, None, "draft_mh", 3, None), ("dflash", 4, None, "power_mh", 2, 0.4)],
    ("dspark", 4, "match_drawn", "temperature", 2, None)))
def test_records_are_those_of_padded_steps_to_the_last_bit(embedded, name, block_size, decoder, sampler, slots, beta):
    drafter, blend = draft(embedded.model, name, block_size), None if beta is None else DraftBlend(beta=beta)
    decoder = None if decoder is None else DECODERS[decoder]
    on = engine_of(embedded, slots, drafter, decoder, blend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "free_rows", lambda parts: False)
        off = engine_of(embedded, slots, drafter, decoder, blend)
    assert off._loop._ladder.row_step == 8
    assert records(on, embedded.prompts[:3], SAMPLERS[sampler]) == records(off, embedded.prompts[:3], SAMPLERS[sampler])


@pytest.fixture
def agreeing(embedded) -> BatchedEngine:
    """An engine whose steps have as many rows as chains. Comparisons are made again."""
    engine = engine_of(embedded, 1, draft(embedded.model, "dflash", 3), match())
    if engine._loop._ladder.row_step != 1:
        pytest.skip("this processor gives fewer rows other bits: steps are padded to eights here")
    return engine


def test_a_round_has_as_many_rows_as_chains(agreeing, embedded, monkeypatch):
    fed, forward = [], ModelRunner.forward

    def counted(self, cache, rows, tokens, *rest, **named):
        fed.append(tuple(tokens.shape))
        return forward(self, cache, rows, tokens, *rest, **named)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    list(agreeing.run([(0, SAMPLERS["greedy"].chain(embedded.prompts[0][:65], 8, Key(0)))]))
    assert {rows for rows, queries in fed if queries == 3} == {1}  # the prompt is read in one piece of 64 tokens


def test_a_draft_that_keeps_its_layers_is_padded(agreeing, monkeypatch):
    network = agreeing.parts.proposer.network
    monkeypatch.setattr(batched, "has_row_layers", lambda other: other is not network)
    assert not batched.free_rows(agreeing.parts)


@pytest.mark.parametrize("where", ["verification", "draft", "attention"])
def test_other_bits_of_few_rows_are_found_out(agreeing, where, monkeypatch):
    """A last bit of one layer is enough: of the target's last one, or the draft's, or of its attention."""
    holder, name = agreeing.parts.proposer.network.layers[-1].mlp.down_proj, "forward"
    if where == "verification":
        holder, name = agreeing.model._loop._layers[-1], "_down"
    elif where == "attention":
        holder, name = attention, "grouped_attention"  # the draft calls it by this name
    own = getattr(holder, name)

    def other(*given, **options):
        found = own(*given, **options)
        state = found[0] if where == "attention" else found
        few = len(given[1]) < batched.ROWS if where == "attention" else given[0].numel() // given[0].shape[-1] < 9
        state = torch.nextafter(state, torch.tensor(torch.inf)) if few else state
        return (state, None) if where == "attention" else state

    assert batched.steps_agree(agreeing.parts)
    monkeypatch.setattr(holder, name, other)
    assert not batched.steps_agree(agreeing.parts)


def test_a_rule_that_depends_on_the_number_of_blocks_is_found_out(agreeing):
    def rule(block, chance):
        verdict = rules.match(block, chance)
        return verdict._replace(tokens=verdict.tokens + (len(block.drafted) != batched.ROWS))

    speculation = agreeing.parts.speculation._replace(rule=rule)
    assert not batched.steps_agree(agreeing.parts._replace(speculation=speculation))
