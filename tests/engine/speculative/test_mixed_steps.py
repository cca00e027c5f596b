"""Draws from the draft and draws by a decoder in a batch: the answers are those of plain decoding and of separate batches."""

import numpy as np
import pytest

from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory
from tests.engine.batching.test_batched import BLENDS, HORIZON, PROMPTS, STOPS, TOLERANCE, chains, same
from tests.engine.speculative.test_block_grid import draft_mh
from tests.engine.speculative.test_speculator import drafter, match, reject
from tests.targets import rows_do_not_depend_on_the_batch

MIXTURE = draft_mh(proposal="mixture", num_steps=3)
NUM_DRAFTED = 4


def run(model, todo, decoder, blend="none", slots=8, uses_draft=True, **options):
    parts = LanguageModel(model, stop_ids=STOPS)
    drafts = drafter("dflash", parts, model)
    engine = BatchedEngine(parts, BLENDS[blend], slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None,
                           decoder.speculation(drafts) if decoder else None, drafts if uses_draft else None)
    return {done.tag: done for done in engine.run(todo)}


def decisions(done):
    return [(entry["cut"], entry["proposal_length"], entry["decision"]) for entry in done.result.trace]


def total(done, name):
    return sum(getattr(each.cost, name) for each in done.values())


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "blend", "slots", "options"), [
    (match(), "none", 8, {}), (match(0.8), "layer_final", 3, {"steps_between_checks": 2}), (match(), "none", 1, {}),
    (match(), "layer", 8, {"read_ahead": 1})])
def test_a_mixture_by_match_is_the_plain_one(qwen3, decoder, blend, slots, options):
    plain = run(qwen3, chains(MIXTURE), None, blend)
    decoded = run(qwen3, chains(MIXTURE), decoder, blend, slots, **options)
    for tag, done in plain.items():
        same(decoded[tag].result, done.result)
        assert decisions(decoded[tag]) == decisions(done)
        assert decoded[tag].cost.tokens_drawn == done.cost.tokens_drawn
    assert sum(done.result.moved for done in plain.values())
    assert total(decoded, "tokens_drafted") == NUM_DRAFTED * total(decoded, "blocks_verified") > 0
    if options.keys() <= {"steps_between_checks"}:  # without the decoder's, the sampler's blocks remain
        assert total(decoded, "blocks_drafted") - total(decoded, "blocks_verified") == total(plain, "blocks_drafted") > 0
    assert total(plain, "blocks_verified") == total(plain, "tokens_drafted") == 0


def drawn(number):
    """A chain that draws from the target alone, if its number is even, or from the draft alone, also from inside blocks."""
    key, path = Key(6).fold_in(number), Trajectory.start(PROMPTS[number % len(PROMPTS)])
    source = "draft" if number % 2 else "base"
    parts = [(yield Draw(path, HORIZON, SamplingParams(0.8), key.fold_in(0), source))]
    for part in range(1, 4):
        start = parts[-1].prefix(min(parts[-1].length, 3 * part - 1))
        parts.append((yield Draw(start, HORIZON, SamplingParams(0.8, top_k=20), key.fold_in(part), source)))
    return ChainResult(Trajectory(path.prompt, *(np.concatenate([getattr(each, name) for each in parts])
                                               for name in ("tokens", "log_p", "log_q", "interval"))))


@pytest.mark.slow
def test_each_kind_of_rows_draws_as_it_does_alone(qwen3):
    """By rejection, whose tokens depend on the draft: the rows beside a row change neither its drafts nor its verdicts."""
    mixed = run(qwen3, [(number, drawn(number)) for number in range(10)], reject())
    targets = run(qwen3, [(number, drawn(number)) for number in range(0, 10, 2)], reject(), uses_draft=False)
    drafts = run(qwen3, [(number, drawn(number)) for number in range(1, 10, 2)], None)
    assert total(targets, "tokens_kept") > 0
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    for tag, done in (targets | drafts).items():
        same(mixed[tag].result, done.result, tolerance)
        verified = (done.cost.blocks_drafted, done.cost.tokens_drawn) if tag in targets else (0, 0)
        assert mixed[tag].cost == done.cost._replace(blocks_verified=verified[0], tokens_verified=verified[1])


@pytest.mark.slow
def test_a_trace_has_the_blocks_of_the_decoder(qwen3):
    done = run(qwen3, chains(MIXTURE), reject(trace=True))
    assert sum(len(each.walk) for each in done.values()) > 0
    for each in done.values():
        assert len(each.walk) == each.cost.blocks_verified
        assert sum(min(block["accepted"], block["gained"]) for block in each.walk) == each.cost.tokens_kept
        assert sum(block["gained"] for block in each.walk) == each.cost.tokens_verified


@pytest.mark.slow
def test_penalties_in_draws_from_the_draft_go_token_by_token(qwen3):
    """Beside draws by the decoder, whose rows they leave as they are."""
    def chain(number):
        params = SamplingParams(0.8, repetition_penalty=1.0 + number % 2)
        return ChainResult((yield Draw(Trajectory.start(PROMPTS[number]), HORIZON, params, Key(number),
                                       "draft" if number % 2 else "base")))

    mixed, plain = (run(qwen3, [(number, chain(number)) for number in range(5)], decoder) for decoder in (match(), None))
    for tag, done in plain.items():
        same(mixed[tag].result, done.result)
        assert (mixed[tag].cost.tokens_drafted > 0) == (tag % 2 == 0)
