"""A draft that learns: tokens, laws and costs do not depend on the batch, and what it learns equals a slow computation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from dflash_mcmc.draft.network import adaptation as learning
from dflash_mcmc.draft.network.adaptation import Adapter, AdaptiveDrafter, AdaptSettings, LowRankDraft
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.ops import SamplingParams, Score
from tests.engine.batching.test_batched import BLENDS, HORIZON, PROMPTS, SAMPLERS, STOPS, TOLERANCE, chains, same
from tests.engine.speculative.test_block_grid import BLEND, DRAFT_MH, draft_mh
from tests.engine.speculative.test_speculator import match, network, reject
from tests.targets import rows_do_not_depend_on_the_batch

MASK, BLOCK, RATE = 60, 5, 0.05
ONLINE = AdaptSettings("online", rank=3, rate=RATE, steps=1, blocks=1, every_blocks=2)
CONTEXT = AdaptSettings("context", rank=3, rate=RATE, steps=3, blocks=6, every_blocks=1)
MODES = {"online": ONLINE, "context": CONTEXT, "every block": ONLINE._replace(every_blocks=1)}


def run(model, sampler, decoder, settings, slots=8, order=None, blend=BLENDS["none"], count=10, **options):
    parts = LanguageModel(model, stop_ids=STOPS)
    drafter = AdaptiveDrafter(network(model), parts, BLOCK, settings)
    engine = BatchedEngine(parts, blend, slots, max(map(len, PROMPTS)) + HORIZON, Options(**options), None,
                           decoder.speculation(drafter) if decoder else None, None if decoder else drafter)
    todo = list(chains(sampler))
    return {done.tag: done for done in engine.run([todo[i] for i in order or range(count)])}


@pytest.mark.parametrize(("name", "mode"), [
    ("temperature", "online"), ("truncated", "context"), ("power_mh_early", "online"),
    *(pytest.param(name, mode, marks=pytest.mark.slow) for mode in MODES
      for name in ("best_of_n", "greedy", "power_smc", "replica_exchange", "lookahead"))])
def test_match_is_plain_whatever_the_draft_learns(qwen3, plain, name, mode):
    adapted = run(qwen3, SAMPLERS[name], match(), MODES[mode], count=5)
    for tag, done in adapted.items():
        same(done.result, plain(name)[tag].result)
        assert done.cost.tokens_drawn == plain(name)[tag].cost.tokens_drawn
    assert sum(done.cost.adapt_steps for done in adapted.values()) > 0
    assert sum(done.adapt_seconds for done in adapted.values()) > 0


@pytest.mark.parametrize(("decoder", "name", "mode"), [
    (reject(), "temperature", "online"), pytest.param(match(), "power_mh_early", "online", marks=pytest.mark.slow),
    *(pytest.param(decoder, name, mode, marks=pytest.mark.slow) for decoder in (match(0.7), reject(verification="block"))
      for name in ("power_mh_early", "best_of_n") for mode in MODES)])
def test_slots_order_and_options_change_nothing(qwen3, decoder, name, mode):
    expected = run(qwen3, SAMPLERS[name], decoder, MODES[mode])
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    for slots, order, options in ((3, [5, 2, 9, 7, 0, 3, 6, 8, 1, 4], {}), (16, None, {"read_ahead": 1}),
                                  (8, None, {"steps_between_checks": 3})):
        other = run(qwen3, SAMPLERS[name], decoder, MODES[mode], slots, order, **options)
        for tag, done in expected.items():
            same(other[tag].result, done.result, tolerance)
            assert other[tag].cost.adapt_steps == done.cost.adapt_steps
            assert other[tag].cost == done.cost


@pytest.mark.slow
def test_rejection_does_not_depend_on_what_is_skipped(qwen3):
    """Tokens depend on the draft here. They must not depend on which tokens an engine takes without a forward."""
    expected = run(qwen3, SAMPLERS["power_mh_early"], reject(), MODES["every block"], count=2)
    other = run(qwen3, SAMPLERS["power_mh_early"], reject(), MODES["every block"], count=2, skip_identical=False)
    for tag, done in expected.items():
        same(other[tag].result, done.result)
        assert other[tag].cost.adapt_steps == done.cost.adapt_steps


def test_rejection_does_not_depend_on_early_rejection(qwen3):
    """Early rejection ends draws sooner, and changes no decision. So a draft must not keep what such a draw has taught."""
    samplers = [SAMPLERS["power_mh_early"], replace(SAMPLERS["power_mh_early"], early_reject="off")]
    early, full = (run(qwen3, sampler, reject(), MODES["every block"], order=[0, 1, 3]) for sampler in samplers)
    assert sum(done.cost.tokens_drawn for done in early.values()) < sum(done.cost.tokens_drawn for done in full.values())
    for tag, done in early.items():
        same(full[tag].result, done.result)


def test_a_draft_that_has_made_no_step_is_the_checkpoint(qwen3):
    frozen = run(qwen3, SAMPLERS["temperature"], reject(trace=True), ONLINE._replace(every_blocks=1000))
    parts = LanguageModel(qwen3, stop_ids=STOPS)
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

    engine = BatchedEngine(parts, BLENDS["none"], 8, max(map(len, PROMPTS)) + HORIZON, Options(), None,
                           reject(trace=True).speculation(DFlashDrafter(network(qwen3), parts, BLOCK)))
    for done in engine.run(chains(SAMPLERS["temperature"])):
        same(frozen[done.tag].result, done.result)
        for ours, theirs in zip(frozen[done.tag].walk, done.walk, strict=True):
            np.testing.assert_allclose(ours["log_q"], theirs["log_q"], atol=TOLERANCE)


class Slow:
    """A draft with merged weights, one forward of the target for every question, and the Adam of PyTorch."""

    def __init__(self, model, settings: AdaptSettings):
        self.model, self.draft = model, network(model)
        self.parts = LanguageModel(model, stop_ids=STOPS)
        self.vector = LowRankDraft(self.draft, settings.rank).start().requires_grad_()
        self.adam = torch.optim.Adam([self.vector], lr=settings.rate, betas=(0.9, 0.95))
        self.rank = settings.rank

    def merged(self) -> dict[str, torch.Tensor]:
        weights = dict(self.draft.named_parameters())
        outputs, inputs = weights["fc.weight"].shape
        down, up = self.vector.split([self.rank * inputs, self.rank * outputs])
        return {**weights, "fc.weight": weights["fc.weight"] + (down.view(inputs, self.rank) @ up.view(self.rank, outputs)).T}

    def target(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.parts.logits(self.parts.decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1])

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the block whose anchor is the last token, (drafted, vocabulary)."""
        with torch.no_grad():
            layers = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            features = torch.cat([layers[layer + 1] for layer in (0, 2, 1)], dim=-1)[:, :-1]
            features[..., 32:64] = self.parts.decoder(input_ids=torch.tensor([tokens])).last_hidden_state[:, :-1]
            fed = self.parts.decoder.get_input_embeddings()(torch.tensor([[tokens[-1], *[MASK] * (BLOCK - 1)]]))
        past = len(tokens) - 1
        return self.parts.logits(torch.func.functional_call(_Block(self.draft), {
            "draft." + name: weight for name, weight in self.merged().items()}, (features, fed, past)))

    def step(self, loss: torch.Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


class _Block(torch.nn.Module):
    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    def forward(self, features, fed, past):
        context = self.draft.keys_values(self.draft.context(features), torch.arange(past)[None])

        def attend(layer, queries, keys, values):
            keys, values = (torch.cat((old[layer], new), dim=2).repeat_interleave(2, dim=1)
                            for old, new in zip(context, (keys, values), strict=True))
            return torch.nn.functional.scaled_dot_product_attention(queries, keys, values)

        return self.draft(fed, past + torch.arange(BLOCK)[None], attend)[0, 1:]


WEIGHTS = torch.exp(-torch.arange(BLOCK - 1) / (BLOCK / 2))


def check_walk(slow: Slow, prompt: list[int], done, learn) -> None:
    """Compares the draft's log q of every block with the slow draft, which learns from each block after it."""
    tokens = [*prompt, *done.result.trajectory.tokens.tolist()]
    for block in done.walk:
        known = tokens[: len(prompt) + block["anchor"] + 1]
        with torch.no_grad():
            log_q = log_softmax(slow.logits(known), dim=-1)
        expected = [float(row[token]) for row, token in zip(log_q, block["drafted"], strict=True)]
        np.testing.assert_allclose(block["log_q"], expected, atol=2e-3)
        learn(known, block)


def test_what_is_learned_online_is_a_slow_computation(qwen3):
    settings = ONLINE
    drawn = run(qwen3, SAMPLERS["temperature"], reject(trace=True), settings)
    for tag in (0, 4):
        slow, pending = Slow(qwen3, settings), []

        def learn(known, block, slow=slow, pending=pending):
            pending.append((known, block))
            if len(pending) < settings.every_blocks:
                return
            losses = weight = 0.0
            for before, each in pending:
                log_q = log_softmax(slow.logits(before), dim=-1)
                for slot in range(min(each["gained"], BLOCK - 1)):
                    log_p = log_softmax(slow.target([*before, *each["drafted"][:slot]]), dim=-1)
                    losses += WEIGHTS[slot] * kl_div(log_q[slot], log_p, reduction="sum", log_target=True)
                    weight += WEIGHTS[slot]
            slow.step(losses / weight)
            pending.clear()

        prompt = PROMPTS[tag % len(PROMPTS)].tolist()
        check_walk(slow, prompt, drawn[tag], learn)
        moved = float((slow.vector - Slow(qwen3, settings).vector).detach().abs().max())
        assert drawn[tag].cost.adapt_steps == len(drawn[tag].walk) // 2
        assert moved > 0.9 * RATE


def test_what_is_learned_from_the_prompt_is_a_slow_computation(qwen3):
    drawn = run(qwen3, SAMPLERS["temperature"], reject(trace=True), CONTEXT._replace(blocks=500), order=[0, 3])
    for tag in (0, 3):
        slow, prompt = Slow(qwen3, CONTEXT), PROMPTS[tag % len(PROMPTS)].tolist()
        for _ in range(CONTEXT.steps):
            losses = weight = 0.0
            for anchor in range(len(prompt) - 1):
                log_q = log_softmax(slow.logits(prompt[: anchor + 1]), dim=-1)
                for slot, label in enumerate(prompt[anchor + 1 : anchor + BLOCK]):
                    losses -= WEIGHTS[slot] * log_q[slot, label]
                    weight += WEIGHTS[slot]
            slow.step(losses / weight)
        check_walk(slow, prompt, drawn[tag], lambda known, block: None)
        assert drawn[tag].cost.adapt_steps == CONTEXT.steps


def test_chains_of_a_problem_pay_for_the_steps_on_their_prompt_once_each(qwen3):
    drawn = run(qwen3, SAMPLERS["best_of_n"], match(), CONTEXT, slots=3, order=[0, 1, 3, 5, 6])
    steps = {tag: done.cost.adapt_steps for tag, done in drawn.items()}
    assert steps == {tag: 0 if len(PROMPTS[tag % len(PROMPTS)]) == 1 else CONTEXT.steps for tag in drawn}


def test_steps_reduce_the_loss(qwen3):
    """The target's law is learned: after many steps on one block the draft is close to it."""
    parts = LanguageModel(qwen3, stop_ids=STOPS)
    drafter = AdaptiveDrafter(network(qwen3), parts, BLOCK, ONLINE)
    generator = torch.Generator().manual_seed(0)
    target = 2.0 * torch.randn(2, BLOCK - 1, parts.vocab_size, generator=generator)
    features, anchors, tokens, counts = torch.randn(1, 9, 96, generator=generator), *map(np.array, ([4, 9], [5, 6], [4, 2]))
    student, losses = drafter._student, []
    adapter = Adapter.fresh(student.start)
    blocks = learning.Blocks(*learning.padded(features), *map(torch.from_numpy, (anchors, tokens)),
                             learning.slot_weights(torch.from_numpy(counts), BLOCK - 1, BLOCK / 2))
    for _ in range(30):
        with torch.no_grad():
            losses.append(float(learning.law_loss(student.logits(blocks, adapter.values), target, blocks.weights)))
        student.learn_verified(adapter, features, anchors, tokens, counts, target)
    assert losses[-1] < 0.5 * losses[0]
    assert adapter.steps == adapter.number == 30


def test_only_slots_with_kept_tokens_before_them_are_learned():
    weights = learning.slot_weights(torch.tensor([1, 3, 4]), 4, 2.5)
    assert (weights > 0).sum(dim=1).tolist() == [1, 3, 4]
    assert weights[2, 2] == pytest.approx(float(np.exp(-2 / 2.5)))
    loss = learning.law_loss(torch.zeros(1, 2, 3), torch.tensor([[[0.0, 0.0, 0.0], [torch.nan] * 3]]),
                             learning.slot_weights(torch.tensor([1]), 2, 1.5))
    assert float(loss) == 0.0


@pytest.mark.parametrize("mode", ["online", "context"])
def test_a_gradient_that_is_not_finite_is_dropped_and_counted(qwen3, mode, monkeypatch):
    frozen = run(qwen3, SAMPLERS["temperature"], reject(), ONLINE._replace(every_blocks=1000))
    name = "law_loss" if mode == "online" else "token_loss"
    monkeypatch.setattr(f"dflash_mcmc.draft.network.adaptation.{name}",
                        lambda logits, *_: logits.sum() * torch.nan)
    done = run(qwen3, SAMPLERS["temperature"], reject(), MODES[mode])
    for tag, each in frozen.items():
        same(done[tag].result, each.result)
        assert done[tag].cost.adapt_steps == 0
    assert sum(each.cost.adapt_dropped for each in done.values()) > 5


def test_a_proposal_learned_from_the_prompt_is_the_same_along_the_chain(qwen3):
    """log q of a drawn sequence equals its score, from any cut. Otherwise Metropolis-Hastings ratios are wrong."""
    def chain(prompt, key):
        from dflash_mcmc.ops import Draw
        from dflash_mcmc.types import ChainResult, Trajectory

        law = SamplingParams(0.7)
        path = yield Draw(Trajectory.start(prompt), HORIZON, law, key.fold_in("a"), "draft")
        cut = path.prefix(path.length // 2)
        again = yield Draw(cut, HORIZON, law, key.fold_in("b"), "draft", path)
        for each, start in ((path, 0), (again, 0), (path, cut.length)):
            scored = yield Score(each.prefix(start), each.tokens[start:], law, "draft")
            np.testing.assert_allclose(scored.log_q, each.log_q, atol=TOLERANCE)
        return ChainResult(again)

    class Sampler:
        @staticmethod
        def chain(prompt, horizon, key):
            return chain(prompt, key)

    settings = CONTEXT._replace(rate=0.2)
    done = run(qwen3, Sampler, None, settings)
    frozen = run(qwen3, Sampler, None, settings._replace(rate=1e-9))
    assert any(done[tag].result.trajectory.tokens.tolist() != frozen[tag].result.trajectory.tokens.tolist() for tag in done)


@pytest.mark.slow
@pytest.mark.parametrize("blend", [BLENDS["none"], BLEND], ids=["none", "draft"])
def test_draft_mh_with_a_prompt_that_was_learned_does_not_depend_on_the_batch(qwen3, blend):
    sampler = draft_mh(**DRAFT_MH["mixture"])
    expected = run(qwen3, sampler, None, CONTEXT, blend=blend, count=4)
    for slots, options in ((2, {}), (16, {"read_ahead": 1})):
        other = run(qwen3, sampler, None, CONTEXT, slots, blend=blend, count=4, **options)
        for tag, done in expected.items():
            same(other[tag].result, done.result)
