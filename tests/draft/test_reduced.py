"""Drafts with a reduced vocabulary: q is 0 for the tokens that they lack, in all rules and samplers that use it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.checkpoint import DFLASH, check_pair
from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine, TabularModel
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.testing import (
    Target,
    balance_error,
    invariance_error,
    power_target,
    transition_matrix,
)
from tests.cases import quick
from tests.draft.network.test_checkpoint import SMALL, assert_one_line, change_tensors, write_config, written
from tests.engine.speculative.test_slotwise import RULES
from tests.laws import product_law
from tests.runs import execute, records_of
from tests.sampler import test_draft_mh as of_draft_mh, test_draft_refine as of_draft_refine, test_power_smc as of_power_smc
from tests.sampler.stages import step_error
from tests.speculation import speculative_error
from tests.targets import random_model

# A config of speculators, as RedHatAI's Qwen3-8B-speculator.dflash has it. Fields with defaults of transformers are left out.

QWEN3_8B = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.4.0",
    "aux_hidden_state_layer_ids": [2, 18, 33], "block_size": 8, "draft_vocab_size": 32000, "dtype": "bfloat16",
    "mask_token_id": 151669, "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None,
    "tie_word_embeddings": False,
    "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": [
        {"proposal_type": "greedy", "speculative_tokens": 7}], "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "transformer_layer_config": {
        "model_type": "qwen3", "vocab_size": 151936, "intermediate_size": 12288, "num_hidden_layers": 5,
        "num_key_value_heads": 8, "max_position_embeddings": 40960, "layer_types": ["full_attention"] * 5,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
}


def changed(**layer) -> dict:
    return {**QWEN3_8B, "transformer_layer_config": {**QWEN3_8B["transformer_layer_config"], **layer}}


def test_a_config_of_speculators(tmp_path):
    assert DFLASH.read_shape(write_config(tmp_path, QWEN3_8B)) == DFlashShape(
        hidden_size=4096, num_layers=5, num_heads=32, num_key_heads=8, head_dim=128, intermediate_size=12288, block_size=8,
        mask_token_id=151669, target_layers=(1, 17, 32), unnormed=True, norm_eps=1e-6, max_positions=40960,
        rope={"rope_type": "default", "rope_theta": 1000000}, sliding=(None,) * 5, dtype=torch.bfloat16,
        vocab_size=151936, draft_vocab_size=32000)


@pytest.mark.parametrize(("config", "field", "value"), [
    ({**QWEN3_8B, "draft_vocab_size": 151936}, "draft_vocab_size", None),
    ({name: value for name, value in QWEN3_8B.items() if name != "draft_vocab_size"}, "draft_vocab_size", None),
    (changed(rope_parameters=None, rope_theta=5e5), "rope", {"rope_type": "default", "rope_theta": 5e5}),
    (changed(rope_parameters=None), "rope", {"rope_type": "default", "rope_theta": 1e4}),
    (changed(head_dim=64, num_attention_heads=16), "head_dim", 64),
    (changed(layer_types=None), "sliding", (None,) * 5),
], ids=str)
def test_spellings(tmp_path, config, field, value):
    assert getattr(DFLASH.read_shape(write_config(tmp_path, config)), field) == value


@pytest.mark.parametrize(("config", "message"), [
    ({**QWEN3_8B, "transformer_layer_config": None}, r"no transformer_layer_config.*allowed: .*model_type qwen3"),
    (changed(model_type="llama"), r"no transformer_layer_config of a network that is known here"),
    (changed(layer_types=["sliding_attention"] * 5, sliding_window=9), r"sliding layers in the layout of speculators"),
    ({**QWEN3_8B, "sample_from_anchor": True}, r"sample_from_anchor true"),
    ({**QWEN3_8B, "aux_hidden_state_layer_ids": ["2"]}, r"target_layer_ids \['2'\]"),
    ({**QWEN3_8B, "aux_hidden_state_layer_ids": [0, 3]}, r"target_layer_ids \[-1, 2\]"),
    ({**QWEN3_8B, "draft_vocab_size": 200_000}, r"draft_vocab_size 200000; allowed: an integer >= 1 and <= 151936"),
    ({**QWEN3_8B, "mask_token_id": None}, r"without mask_token_id"),
    ({**QWEN3_8B, "target_hidden_size": 5120}, r"target_hidden_size 5120; allowed: hidden_size, which is 4096"),
], ids=str)
def test_refused_configs(tmp_path, config, message):
    with pytest.raises(UserError, match=message) as caught:
        DFLASH.read_shape(write_config(tmp_path, config))
    assert_one_line(caught.value, tmp_path)


def test_the_last_layer_of_the_target_is_refused():
    shape = dataclasses.replace(SMALL, unnormed=True)
    check_pair(shape, hidden_size=24, vocab_size=8, num_layers=6)
    with pytest.raises(UserError, match=r"reads the target's last layer before its final norm; allowed: up to 4 in aux_"):
        check_pair(dataclasses.replace(shape, num_target_layers=None), hidden_size=24, vocab_size=8, num_layers=5)


# The files.

REDUCED = dataclasses.replace(SMALL, vocab_size=61, draft_vocab_size=3)


def with_tokens(folder: Path, ids: list[int], dtype=torch.int64) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"d2t": torch.tensor(ids, dtype=dtype) - torch.arange(len(ids))}))


def test_what_is_saved_is_loaded(tmp_path):
    draft, folder = written(tmp_path / "new", REDUCED)
    with_tokens(folder, [4, 0, 60], torch.int32)
    change_tensors(folder, lambda tensors: tensors.update({"t2d": torch.zeros(61, dtype=torch.bool)}))
    loaded = checkpoint.load(folder, torch.bfloat16, "cpu")
    assert loaded.shape == REDUCED
    assert (loaded.lm_head.weight.dtype, loaded.d2t.dtype) == (torch.bfloat16, torch.int64)
    assert torch.equal(loaded.lm_head.weight, draft.lm_head.weight.bfloat16())


@pytest.mark.parametrize(("ids", "message"), [
    ([4, 0, 61], r"d2t that maps no two tokens.*allowed: places \+ d2t that are different ids from 0 to 60"),
    ([4, -1, 6], r"d2t that maps no two tokens"), ([4, 0, 4], r"d2t that maps no two tokens"),
    ([4, 0], r"d2t of shape \(2,\); allowed: \(3,\)"), (None, r"lacks d2t"), ("float", r"d2t in F32; allowed: I64, I32")])
def test_a_wrong_d2t_is_refused(tmp_path, ids, message):
    _, folder = written(tmp_path, REDUCED)
    if ids is None:
        change_tensors(folder, lambda tensors: tensors.pop("d2t"))
    elif ids == "float":
        with_tokens(folder, [4, 0, 60], torch.float32)
    else:
        with_tokens(folder, ids)
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load(folder, None, "cpu")
    assert_one_line(caught.value, folder)


# The law of a network: one head row for each of its tokens, and q = 0 for the others.


def network(model: torch.nn.Module, ids: list[int], seed: int = 0, **changes) -> DFlash:
    """A random DFlash draft for a random target."""
    shape = DFlashShape(**{**dict(
        hidden_size=model.config.hidden_size, num_layers=1, num_heads=4, num_key_heads=2, head_dim=8, intermediate_size=40,
        block_size=3, mask_token_id=2, target_layers=(0, 2), max_positions=512, sliding=(None,),
        rope={"rope_type": "default", "rope_theta": 1e4}, vocab_size=model.config.vocab_size, draft_vocab_size=len(ids)),
        **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = DFlash(shape)
        draft.lm_head.weight.data.normal_()
        draft.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    return draft.eval().requires_grad_(False)


@pytest.mark.parametrize("changes", [{}, {"logit_scale": 0.5, "logit_softcap": 3.0}], ids=str)
def test_logits_by_hand(changes):
    model, ids = random_model("qwen3"), [7, 3, 60]
    target = LanguageModel(model)
    target.forbid([3])
    draft = network(model, ids, **changes)
    hidden = torch.randn(2, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    found = DFlashDrafter(draft, target, 3).logits(hidden).numpy()
    exact = hidden.double().numpy() @ draft.lm_head.weight.double().numpy().T
    expected = np.full((2, 2, 61), -np.inf)
    expected[..., ids] = 3.0 * np.tanh(exact * 0.5 / 3.0) if changes else exact
    expected[..., 3] = -np.inf
    assert np.allclose(found, expected, atol=3e-5)


# Rules, and samplers that draw from the draft. It lacks token 1.


class Lacking(TabularDraft):
    def logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(3) == 1, -np.inf, super().logits(prefix, drafted))


@pytest.mark.parametrize("rule", quick(RULES, "token"))
def test_every_rule_keeps_the_targets_law(rule):
    model, draft = TabularModel(3, (0,)), Lacking(3, 2)
    for law, horizon in ((SamplingParams(0.8), 3), (SamplingParams(1.2, top_k=2, repetition_penalty=1.7), 2)):
        assert speculative_error(RULES[rule].speculation(draft), law, horizon, model) <= 1e-12


def tabular(num_drafted: int = 2) -> TabularEngine:
    return TabularEngine(TabularModel(3, (0,), seed=0, scale=0.5), None, None, Lacking(3, num_drafted, seed=7, scale=0.7))


def kernel(sampler, horizon: int = 3) -> tuple[np.ndarray, Target]:
    """The transition matrix over all sequences, and p^alpha."""
    engine = tabular()
    target = power_target(engine, horizon, sampler.alpha, SamplingParams(1.0), "base")
    return transition_matrix(engine, sampler, horizon, target), target


def irreducible(matrix: np.ndarray) -> bool:
    """Whether every state is reached from every other in some number of steps."""
    return bool((np.linalg.matrix_power((matrix > 0) + np.eye(len(matrix)), len(matrix)) > 0).all())


@pytest.mark.parametrize("changes", [{}, {"draft_temperature": 0.6}], ids=str)
def test_the_mixture_is_exact_and_irreducible(changes):
    """A state with a token that the draft lacks has the density of the target's part alone."""
    matrix, target = kernel(of_draft_mh.make(proposal="mixture", **changes))
    assert any(1 in state for state in target.states)
    assert max(invariance_error(matrix, target), balance_error(matrix, target)) <= 1e-12
    assert irreducible(matrix)


def test_draft_refine_keeps_its_law_and_power_smc_would_not():
    assert step_error(tabular(), of_draft_refine.make(cut="confidence"), of_draft_refine.HORIZON) <= 1e-12
    smc, p = of_power_smc.make(proposal="draft", temperature=0.8), product_law(tabular(1).model, 2, None)
    found, expected = of_power_smc.weights_of(smc, tabular(1)), {x: share**smc.alpha for x, share in p.items()}
    lost = [x for x in expected if x[-1] == 1 and len(x) == 2]
    assert lost
    assert all(found.get(x, 0.0) == 0.0 < expected[x] for x in lost)


# Whole runs: the embedded draft in the layout of speculators, with half of the vocabulary.


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    return speculators_folder(tmp_path_factory.mktemp("half"), [*range(0, 473, 2)])


def speculators_folder(folder: Path, ids: list[int] | None) -> Path:
    """Writes the embedded draft as speculators does; without ids with the whole vocabulary."""
    source = PACKAGE / "assets" / "tiny_draft"
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    target = load_file(PACKAGE / "assets" / "tiny" / "model.safetensors")
    embedding = target["model.embed_tokens.weight"]
    head = target.get("lm_head.weight", embedding)
    own = config.pop("dflash_config")
    layer = {name: value for name, value in config.items() if name not in (
        "block_size", "architectures", "dtype", "training", "num_target_layers", "tie_word_embeddings")}
    write_config(folder, {
        "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [each + 1 for each in own["target_layer_ids"]], "mask_token_id": own["mask_token_id"],
        "draft_vocab_size": len(ids) if ids else len(head), "transformer_layer_config": {**layer, "vocab_size": len(head)}})
    more = {"embed_tokens.weight": embedding, "lm_head.weight": head[ids].clone() if ids else head.clone()}
    if ids:
        more |= {"d2t": torch.tensor(ids) - torch.arange(len(ids)),
                 "t2d": torch.zeros(len(head), dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)}
    save_file({**tensors, **more}, folder / "model.safetensors")
    return folder


SHORT = ("dataset.limit=2", "dataset.max_new_tokens=24", "sampler=temperature")


@pytest.mark.slow
def test_the_whole_vocabulary_in_that_layout_is_the_same_draft(make_config, tmp_path):
    found = [records_of(execute(make_config(*SHORT, "decoder=speculative_rejection", *draft)).folder)
             for draft in (("draft=dflash", f"draft.path={speculators_folder(tmp_path / 'whole', None)}"), ("draft=tiny",))]
    assert [record["tokens"] for record in found[0].values()] == [record["tokens"] for record in found[1].values()]


@pytest.mark.parametrize(("given", "line"), [
    (["sampler=draft_mh"], r"draft: given 'dflash'; allowed: a draft with all tokens of the target with sampler=draft_mh, or "
     r"sampler.proposal=mixture: sequences with a token that this draft lacks would never be proposed"),
    (["sampler=power_smc", "sampler.proposal=draft"], r"with sampler.proposal=draft, or sampler.proposal=target: sequences"),
    (["blend=draft"], r"draft: given 'dflash'; allowed: a draft with all tokens of the target with blend=draft"),
])
def test_what_is_refused(make_config, half, given, line):
    with pytest.raises(UserError, match=line):
        make_config("draft=dflash", f"draft.path={half}", *given)
