"""`draft=eagle3`: laws by enumeration, entries that follow the target's rows, and runs."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.draft.eagle3 import Eagle3Draft
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.eagle3 import FAMILY, Eagle3
from dflash_mcmc.engine.batching import batched
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.oracle.tabular import TabularDraft
from dflash_mcmc.engine.speculative.drafter import EagleDrafter
from dflash_mcmc.errors import UserError
from dflash_mcmc.sampler.draft_refine import DraftRefine
from tests.cases import quick
from tests.draft.network.test_eagle3 import Layout, Published, layout, proposed, stored
from tests.engine.batching.test_batched import (
    BLENDS,
    SAMPLERS,
    all_same,
    power_smc,
    run_batched,
)
from tests.engine.speculative.slotwise_drafts import ModelTable, small_table
from tests.engine.speculative.test_block_grid import draft_mh
from tests.engine.speculative.test_slotwise import LAW, RULES
from tests.engine.speculative.test_speculator import match
from tests.runs import execute, records_of
from tests.speculation import speculative_error
from tests.targets import random_model

# The law of what the drafter proposes, by enumeration.


class ProposedDraft(TabularDraft):
    """An `EagleDrafter` as the draft of a tabular engine: its laws are those that `propose` gives to the engine."""

    def __init__(self, table: ModelTable, made: Layout, folder: Path, num_drafted: int):
        super().__init__(table.vocab_size, num_drafted, sequential=True)
        self._drafter = EagleDrafter(checkpoint.load(stored(made, folder), None, "cpu", FAMILY), table.parts, num_drafted)
        self.slots = functools.cache(lambda prefix, drafted: proposed(self._drafter, prefix, drafted)[len(drafted)])

    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return self.slots(prefix, drafted)


@functools.cache
def small_model() -> torch.nn.Module:
    return random_model("qwen3", sharpness=0.4, vocab_size=3, eos_token_id=0)


@pytest.mark.parametrize("ids", [None, [2, 0]], ids=["whole", "reduced"])
@pytest.mark.parametrize("rule", quick(RULES, "token", "block"))
def test_law_is_exact(rule, ids, tmp_path):
    draft = ProposedDraft(small_table(), layout("specforge", small_model(), ids, (0, 2, 1)), tmp_path, 2)
    assert (draft.logits((0, 1), (2,))[1] == -np.inf) == (ids is not None)
    assert abs(draft.logits((0, 1), (2,))[0] - draft.logits((0, 1), (0,))[0]) > 1e-3  # a slot depends on the tokens before it
    assert speculative_error(RULES[rule].speculation(draft), LAW, 2, small_table()) <= 1e-12


# The batched engine.


@pytest.fixture(scope="module")
def qwen3():
    return random_model("qwen3")


@functools.cache
def made() -> Layout:
    """A draft whose features are those of the last layers, and which lacks a few tokens."""
    model = random_model("qwen3")
    return layout("specforge", model, [token for token in range(61) if token % 10], (1, 0, 2))


@functools.cache
def network() -> Eagle3:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return checkpoint.load(stored(made(), Path(folder)), None, "cpu", FAMILY)


NUM_DRAFTED = 3


def run(model, sampler, decoder=None, blend="none", **more):
    return run_batched(model, SAMPLERS[sampler] if isinstance(sampler, str) else sampler, BLENDS[blend], decoder=decoder,
                       draft=lambda parts: EagleDrafter(network(), parts, NUM_DRAFTED), **more)


@pytest.mark.parametrize("name", quick(SAMPLERS, "power_mh_early"))
def test_match_is_plain(qwen3, name):
    found = run(qwen3, name, match(0.8))
    all_same(found, run_batched(qwen3, SAMPLERS[name], BLENDS["none"]))
    for done in found.values():
        assert done.cost.companion_forwards == 0
        assert done.cost.tokens_drafted == NUM_DRAFTED * done.cost.blocks_drafted


DRAWING = {"mixture": draft_mh(proposal="mixture", num_steps=3), "refine": DraftRefine(num_blocks=3, num_steps=2),
           "draft": draft_mh(num_steps=3), "smc": power_smc(proposal="draft")}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWING)
def test_draws_from_the_draft_have_the_laws_of_the_definition(qwen3, name):
    """log q of every answer, and the same answers in few slots.

    The samplers whose laws need all tokens refuse this draft in a configuration; the engine draws the same for all.
    """
    expected = run(qwen3, DRAWING[name], uses_draft=True)
    for changes in ({"slots": 3}, {"skip_identical": False}):
        all_same(run(qwen3, DRAWING[name], uses_draft=True, **changes), expected)
    if name == "draft":
        are_of_the_definition(qwen3, list(expected.values())[::3])


def are_of_the_definition(model, drawn) -> None:
    """Compares log q of all tokens in a block."""
    published = Published(made(), model)
    for path in (done.result.trajectory for done in drawn):
        for at in range(path.length):
            slot = at % (NUM_DRAFTED + 1)
            tokens = tuple(path.sequence.tolist()[: len(path.prompt) + at])
            if slot:
                logits = published.logits(tokens[: len(tokens) - slot + 1], tokens[len(tokens) - slot + 1 :]) / 0.7
                log_q = torch.log_softmax(torch.from_numpy(logits), dim=-1)[path.tokens[at]]
                assert abs(path.log_q[at] - float(log_q)) < 1e-3


@pytest.mark.slow
def test_draws_from_the_draft_on_a_hybrid_go_token_by_token():
    hybrid = random_model("qwen3_5")
    are_of_the_definition(hybrid, list(run(hybrid, DRAWING["draft"], uses_draft=True).values())[:3])


def test_steps_of_a_packed_draft_are_compared(make_config, tmp_path, monkeypatch):
    """A step of few rows is compared with one of many over the draft's entries too. Roundings differ between machines."""
    monkeypatch.setattr(torch, "equal", lambda ours, theirs: torch.allclose(ours, theirs, atol=1e-3))
    target = make_config("model=tiny").model.load("cpu")
    drafter = make_config("draft=eagle3", f"draft.path={for_tiny(tmp_path)}", "decoder=speculative_match").draft.load(target)
    parts = BatchedEngine(target, None, 1, 64, speculation=match().speculation(drafter)).parts
    assert batched.steps_agree(parts)
    drafter.network.fc.register_forward_hook(lambda _, inputs, states: states + (len(states) == 1))
    assert not batched.steps_agree(parts)


# Runs.


def for_tiny(folder: Path) -> Path:
    """Writes a random draft for the embedded model, which lacks every tenth token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PACKAGE / "assets" / "tiny", dtype=torch.float32)
    ids = [token for token in range(model.config.vocab_size) if token % 10]
    chosen = layout("specforge", model, ids, (0, 1, 2))
    head = load_file(PACKAGE / "assets" / "tiny" / "model.safetensors").get("lm_head.weight", model.lm_head.weight.detach())
    chosen.tensors["lm_head.weight"] = head[ids].float().clone()
    return stored(chosen, folder)


SHORT = ("dataset.limit=2", "dataset.max_new_tokens=24", "sampler=temperature")


@pytest.mark.slow
def test_runs_with_a_checkpoint(make_config, tmp_path):
    draft = ("draft=eagle3", f"draft.path={for_tiny(tmp_path / 'draft')}")
    plain = records_of(execute(make_config(*SHORT)).folder)
    matched = records_of(execute(make_config(*SHORT, *draft, "decoder=speculative_match")).folder)
    assert [record["tokens"] for record in matched.values()] == [record["tokens"] for record in plain.values()]
    assert all(record["tokens_drafted"] == 4 * record["blocks_drafted"] > 0 for record in matched.values())
    refined = make_config(*SHORT[:2], *draft, "sampler=draft_refine", "sampler.num_steps=4")
    assert all(record["blocks_drafted"] for record in records_of(execute(refined).folder).values())


@pytest.mark.parametrize(("given", "line"), [
    (["decoder=speculative_match", "draft.num_drafted=0"], r"draft.num_drafted: given 0; allowed: a whole number >= 1"),
    (["sampler=draft_mh"], r"a draft with all tokens of the target with sampler=draft_mh, or sampler.proposal=mixture"),
    (["sampler=power_smc", "sampler.proposal=draft"], r"with sampler.proposal=draft, or sampler.proposal=target"),
    (["blend=draft"], r"draft: given 'eagle3'; allowed: .*with blend=draft"),
    (["engine=vllm", "decoder=speculative_match"], r"decoder: given 'speculative_match'; allowed: plain with engine=vllm"),
])
def test_what_is_refused(make_config, tmp_path, given, line):
    with pytest.raises(UserError, match=line):
        make_config("draft=eagle3", f"draft.path={for_tiny(tmp_path)}", *given)


def test_another_network_is_refused(make_config, tmp_path):
    folder = for_tiny(tmp_path)
    assert isinstance(make_config("decoder=speculative_match", f"draft={folder}").draft, Eagle3Draft)
    for draft in ("dflash", "dspark", "dflash2"):
        with pytest.raises(UserError, match=r"checkpoint of LlamaForCausalLMEagle3; allowed: D"):
            make_config("decoder=speculative_match", f"draft={draft}", f"draft.path={folder}")
    with pytest.raises(UserError, match=r"checkpoint of DFlashDraftModel; allowed: LlamaForCausalLMEagle3"):
        make_config("decoder=speculative_match", "draft=eagle3", f"draft.path={PACKAGE / 'assets' / 'tiny_draft'}")
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] > 0
