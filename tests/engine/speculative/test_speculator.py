"""Speculation on the batched engine gives the same answers as decoding token by token, for every draft."""

import functools
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.logits_processor import History
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter, NgramDrafter, SelfDrafter, SlotwiseDrafter
from dflash_mcmc.engine.speculative.steps import Speculator
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.cases import quick
from tests.engine.api.test_law import p_value
from tests.engine.batching.test_batched import BLENDS, PROMPTS, SAMPLERS, STOPS, TOLERANCE, chains, run_batched, same
from tests.engine.speculative.slotwise_drafts import random_network, shape_of
from tests.targets import queries_do_not_depend_on_the_others, random_model, rows_do_not_depend_on_the_batch

MASK = 60


def network(model, block_size=5, sliding=(None, None), seed=0) -> DFlash:
    """A random draft for a random target. It is sharp enough for some drafted tokens to be accepted."""
    config = model.config
    shape = DFlashShape(hidden_size=config.hidden_size, num_layers=len(sliding), num_heads=4, num_key_heads=2, head_dim=8,
                        intermediate_size=40, block_size=block_size, mask_token_id=MASK, target_layers=(0, 2, 1),
                        rope={"rope_type": "default", "rope_theta": 1e4}, max_positions=512, sliding=sliding)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = DFlash(shape).eval().requires_grad_(False)
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return draft


def drafter(name: str, parts: LanguageModel, model: torch.nn.Module):
    if name.startswith("dflash"):
        return DFlashDrafter(network(model, sliding=(4, None) if name == "dflash_sliding" else (None, None)), parts,
                             3 if name == "dflash_short" else 5)
    if name in ("dspark", "dflash2"):
        return SlotwiseDrafter(random_network(shape_of("rnn" if name == "dspark" else name, model, 4, MASK)), parts)
    return {"self": SelfDrafter(3), "ngram": NgramDrafter(6, 2)}[name]


def match(temperature=0.0, trace=False) -> SpeculativeMatch:
    return SpeculativeMatch(draft_temperature=temperature, trace=trace, fault=None, fault_window=None)


def reject(temperature=None, verification="token", trace=False) -> SpeculativeRejection:
    return SpeculativeRejection(draft_temperature=temperature, verification=verification, trace=trace, fault=None)


def run(model, sampler, blend, decoder, draft, slots=8, order=None, **options):
    return run_batched(model, sampler, blend, slots, order, decoder, lambda parts: drafter(draft, parts, model), **options)


DRAFTS = ("dflash", "dflash_short", "dflash_sliding", "dspark", "dflash2", "self", "ngram")


@pytest.mark.parametrize(("name", "draft"), quick(
    itertools.product(SAMPLERS, DRAFTS), ("power_mh_early", "dflash"),
    *(("truncated", draft) for draft in ("self", "ngram", "dspark"))))
def test_match_is_plain(qwen3, plain, name, draft):
    speculative = run(qwen3, SAMPLERS[name], BLENDS["none"], match(), draft)
    for tag, done in plain(name, "none").items():
        same(speculative[tag].result, done.result)
        assert speculative[tag].cost.tokens_drawn == done.cost.tokens_drawn
    if draft == "self":
        assert sum(d.cost.tokens_kept for d in speculative.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("blend", ["layer_final", "layer", "last_layer"])
def test_match_is_plain_under_a_blend(qwen3, plain, blend):
    for name in ("truncated", "power_mh_early"):
        for decoder, draft in ((match(), "dflash"), (match(0.8), "self")):
            speculative = run(qwen3, SAMPLERS[name], BLENDS[blend], decoder, draft)
            for tag, done in plain(name, blend).items():
                same(speculative[tag].result, done.result)


@pytest.mark.slow
def test_greedy_by_rejection_is_plain(qwen3, plain):
    for decoder, draft in ((reject(), "dflash"), (reject(verification="block"), "self"), (reject(), "ngram"),
                           (reject(), "dflash2"), (reject(verification="block"), "dspark")):
        speculative = run(qwen3, SAMPLERS["greedy"], BLENDS["none"], decoder, draft)
        for tag, done in plain("greedy", "none").items():
            same(speculative[tag].result, done.result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "decoder", "draft"), [
    ("power_mh_early", reject(verification="block"), "self"),
    *((name, *pair) for name in ("power_mh_early", "truncated") for pair in (
        (match(), "dflash"), (match(0.6), "dflash_sliding"), (reject(), "dflash"), (reject(), "ngram"), (reject(), "dspark"),
        (reject(verification="block"), "dflash2")))])
def test_slots_order_and_reading_ahead_change_nothing(qwen3, decoder, draft, name):
    expected = run(qwen3, SAMPLERS[name], BLENDS["none"], decoder, draft)
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    for slots, order, options in ((3, [5, 2, 9, 7, 0, 3, 6, 8, 1, 4], {}), (8, None, {"steps_between_checks": 3}),
                                  (16, None, {"read_ahead": 1})):
        other = run(qwen3, SAMPLERS[name], BLENDS["none"], decoder, draft, slots, order, **options)
        for tag, done in expected.items():
            same(other[tag].result, done.result, tolerance)
            assert other[tag].cost == done.cost


def test_a_draft_of_the_same_law_is_always_kept(qwen3):
    """The target drafts for itself, so p = q. Only tokens after a stop id or after the horizon are not kept."""
    plain = SAMPLERS["temperature"]
    for decoder in (reject(), reject(verification="block")):
        for done in run(qwen3, plain, BLENDS["none"], decoder, "self").values():
            blocks = -(-done.result.trajectory.length // 4)
            assert done.cost.blocks_drafted == blocks
            assert done.cost.tokens_kept >= done.result.trajectory.length - blocks
            assert done.cost.target_forwards >= 4 * blocks


def single_draws(model, decoder, draft, law, count, horizon=2):
    """Pairs of tokens drawn by separate chains. Each chain has its own key."""
    def chain(number):
        path = yield Draw(Trajectory.start(np.array([11, 5, 23])), horizon, law, Key(99).fold_in(number))
        return ChainResult(path)

    parts = LanguageModel(model, stop_ids=())
    speculation = decoder.speculation(drafter(draft, parts, model)) if decoder else None
    engine = BatchedEngine(parts, BLENDS["none"], 64, 16, Options(), None, speculation)
    return np.array([done.result.trajectory.tokens for done in engine.run((n, chain(n)) for n in range(count))])


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "draft"), [
    (reject(verification="block"), "dflash"), (reject(), "dflash"), (reject(), "dspark"), (reject(0.5), "dflash"),
    (reject(), "self"), (reject(), "ngram")])
def test_rejection_has_the_law_of_the_target(qwen3, decoder, draft):
    law, count = SamplingParams(0.9, top_k=5), 3000
    pairs = single_draws(qwen3, decoder, draft, law, count)
    with torch.inference_mode():
        def conditional(tokens):
            logits = torch.topk(qwen3(torch.tensor([tokens])).logits[0, -1].double() / 0.9, 5)
            return dict(zip(logits.indices.tolist(), torch.softmax(logits.values, 0).tolist(), strict=True))

        expected = {(a, b): p * q for a, p in conditional([11, 5, 23]).items() for b, q in conditional([11, 5, 23, a]).items()}
    assert p_value(Counter(map(tuple, pairs.tolist())), expected) > 1e-4


@pytest.mark.slow
def test_drafts_are_those_of_a_fresh_forward(qwen3, monkeypatch):
    """The network sees the features of the tokens before the anchor, even after roll-backs, copies and moves of the cache."""
    seen = []
    propose = DFlashDrafter.propose

    def keep(self, anchors, draw):
        def keeping(logits, first):
            live = [row for row in range(len(anchors.position)) if int(anchors.position[row])]
            seen.extend((anchors.tokens[row, : int(anchors.position[row]) + 1].clone(), logits[row].clone()) for row in live)
            return draw(logits, first)
        return propose(self, anchors, keeping)

    monkeypatch.setattr(DFlashDrafter, "propose", keep)
    monkeypatch.setattr(DFlashDrafter, "reads_tokens", True)  # the sequences are then stored, and `keep` can record them
    run(qwen3, SAMPLERS["power_mh"], BLENDS["none"], match(), "dflash", slots=4)
    parts, draft = LanguageModel(qwen3, stop_ids=STOPS), network(qwen3)
    generator = np.random.default_rng(0)
    for number in generator.choice(len(seen), 60, replace=False):
        tokens, logits = seen[number]
        with torch.inference_mode():
            states = qwen3(tokens[None], output_hidden_states=True).hidden_states
            features = torch.cat([states[layer + 1] for layer in (0, 2, 1)], dim=-1)[:, :-1]
            past = len(tokens) - 1
            context = draft.keys_values(draft.context(features), torch.arange(past)[None])
            fed = torch.tensor([[int(tokens[-1]), MASK, MASK, MASK, MASK]])

            def attend(layer, queries, keys, values, context=context):
                keys, values = (torch.cat((old[layer], new), dim=2).repeat_interleave(2, dim=1)
                                for old, new in zip(context, (keys, values), strict=True))
                return torch.nn.functional.scaled_dot_product_attention(queries, keys, values)

            hidden = draft(parts.decoder.get_input_embeddings()(fed), past + torch.arange(5)[None], attend)[0, 1:]
            expected = parts.logits(hidden)
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)


def test_prompt_lookup_finds_what_followed():
    from dflash_mcmc.engine.speculative.drafter import Anchors

    rows = torch.tensor([[1, 2, 3, 4, 1, 2, 9, 9, 9], [5, 6, 5, 6, 5, 6, 0, 0, 0], [1, 2, 3, 4, 5, 6, 0, 0, 0],
                         [7, 8, 1, 8, 2, 7, 8, 0, 0]])
    anchors = Anchors(slice(0, 4), None, rows, torch.tensor([5, 5, 5, 6]), 9)
    drafted = NgramDrafter(4, 2).propose(anchors, None)
    assert drafted.tolist() == [[3, 4, 1, 2], [5, 6, 5, 6], [6, 6, 6, 6], [1, 8, 2, 7]]


def test_prompt_lookup_reads_the_sequence(qwen3):
    """It drafts earlier tokens of the sequence, also if the current draw did not draw the prefix."""
    for tag, done in run(qwen3, SAMPLERS["truncated"], BLENDS["none"], match(trace=True), "ngram").items():
        tokens = done.result.trajectory.tokens.tolist()
        for block in done.walk:
            known = [*PROMPTS[tag % len(PROMPTS)].tolist(), *tokens[: block["anchor"] + 1]]
            assert set(block["drafted"]) <= set(known)


def test_a_penalty_counts_more_than_255_equal_tokens_of_a_block():
    maker = SimpleNamespace(speculation=SimpleNamespace(fault=SimpleNamespace(late_history=False)))
    state = SimpleNamespace(vocab_size=4, history=lambda batch: History(torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4)))
    seen, counts, *_ = Speculator._history(maker, state, 1, torch.full((1, 300), 2))
    assert counts[:, 2].tolist() == list(range(1, 302))
    assert counts[:, 3].tolist() == [1] * 301
    assert seen[:, 2].tolist() == [False] + [True] * 300


def test_drafts_that_are_no_numbers_end_the_sample(qwen3):
    """This holds for rules that use the draft's law. Sample and match does not use it."""
    parts, broken = LanguageModel(qwen3, stop_ids=STOPS), network(qwen3)
    broken.norm.weight.data.fill_(torch.nan)
    for decoder, healthy in ((reject(), False), (reject(verification="block"), False), (match(), True)):
        engine = BatchedEngine(parts, BLENDS["none"], 4, 180, Options(), None,
                               decoder.speculation(DFlashDrafter(broken, parts, 5)))
        results = [d.result for d in engine.run(chains(SAMPLERS["truncated"]))]
        assert all((result is not None) == healthy for result in results)


def test_trace_describes_every_block(qwen3):
    for decoder, name in ((match(trace=True), "truncated"), (reject(trace=True), "temperature"),
                          (match(trace=True), "greedy")):
        other = run(qwen3, SAMPLERS[name], BLENDS["none"], decoder, "self", slots=2, order=[3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
        for tag, done in run(qwen3, SAMPLERS[name], BLENDS["none"], decoder, "self").items():
            assert json.dumps(done.walk, allow_nan=False) == json.dumps(other[tag].walk, allow_nan=False)
            tokens = done.result.trajectory.tokens.tolist()
            assert sum(block["gained"] for block in done.walk) == len(tokens)
            assert len(done.walk) == done.cost.blocks_drafted
            for block in done.walk:
                start = block["anchor"] + 1
                assert block["tokens"][: block["gained"]] == tokens[start : start + block["gained"]]
                assert block["tokens"][: block["accepted"]] == block["drafted"][: block["accepted"]]
                if block["accepting"] and block["log_q"]:
                    passes = [u < np.exp(p - q) for u, p, q in zip(block["accepting"], block["log_p"], block["log_q"],
                                                                   strict=True)]
                    assert block["accepted"] == ([*passes, False].index(False))


@pytest.fixture(scope="module")
def hybrid():
    """A target with recurrent layers: a block has to leave the state after the tokens that are kept."""
    return random_model("qwen3_5")


@pytest.fixture(scope="module")
def plain_hybrid(hybrid):
    """Answers of a sampler, drawn once, token by token."""
    return functools.cache(lambda name: run_batched(hybrid, SAMPLERS[name], BLENDS["none"], snapshot_every=8))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "draft"), [
    ("temperature", "dflash"), ("power_mh_early", "dflash"), ("power_mh_early", "self"), ("greedy", "ngram"),
    ("best_of_n", "dflash")])
def test_match_is_plain_with_recurrent_layers(hybrid, plain_hybrid, name, draft):
    speculative = run(hybrid, SAMPLERS[name], BLENDS["none"], match(0.8), draft, snapshot_every=8)
    exact = queries_do_not_depend_on_the_others()  # a verification reads a block in one piece
    for tag, done in plain_hybrid(name).items():
        same(speculative[tag].result, done.result, 0.0 if exact and draft != "self" else TOLERANCE)
    assert sum(d.cost.tokens_kept for d in speculative.values()) > 0
