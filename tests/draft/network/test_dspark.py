"""DSpark drafts: the configuration in both layouts, the heads against their definitions, and the drafter."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.dflash2 import FAMILY as DFLASH2
from dflash_mcmc.draft.network.dspark import FAMILY as DSPARK
from dflash_mcmc.engine.speculative.drafter import Anchors, SlotwiseDrafter
from dflash_mcmc.errors import UserError
from tests.engine.speculative.slotwise_drafts import KINDS, random_network, shape_of, small_table
from tests.targets import random_model

ROWS = {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}
HEADS = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
         "confidence_head_with_markov": True}
QWEN3 = {
    "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
    "layer_types": ["full_attention"] * 5, "num_target_layers": 36, "block_size": 7,
}
DEEPSPEC = {**QWEN3, "architectures": ["Qwen3DSparkModel"], **ROWS, **HEADS, "num_anchors": 512}
SPECFORGE = {**QWEN3, "architectures": ["DSparkDraftModel"], "dflash_config": {
    **ROWS, **HEADS, "attention_mode": "gqa", "projector_type": "dspark", "confidence_head_alpha": 1.0}}
MUSE = {
    **QWEN3, "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True, "sliding_window": 2048, "dflash_config": {
        **ROWS, "block_size": 16, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
        "final_logit_softcapping": 20.0, "output_multiplier": 0.196}}
MUSE.pop("block_size")


def shape(folder, config, family=DSPARK):
    (folder / "config.json").write_text(json.dumps(config))
    return family.read_shape(folder)


def test_both_layouts_of_dspark_are_one_shape(tmp_path):
    found = shape(tmp_path, DEEPSPEC)
    assert shape(tmp_path, SPECFORGE) == found
    assert (found.num_drafted, found.first_row, found.markov_rank, found.markov_head) == (7, 0, 256, "vanilla")
    with torch.device("meta"):
        network = DSPARK.network(found)
    assert len(network.state_dict()) == 60  # the published 64 without copies of embedding and head, and the confidence head
    assert sum(parameter.numel() for parameter in network.parameters()) == 615_218_432


@pytest.mark.parametrize(("changes", "field", "value"), [
    ({"markov_rank": 0}, "markov_rank", 0),
    ({"markov_head_type": "RNN"}, "markov_head", "rnn"),
    ({"sample_from_anchor": False}, "num_drafted", 6),
    ({"target_layer_ids": [-1, 3]}, "target_layers", (-1, 3)),
    ({"architectures": ["DFlashDraftModel"], "projector_type": "dspark"}, "num_drafted", 7),
])
def test_spellings(tmp_path, changes, field, value):
    assert getattr(shape(tmp_path, {**DEEPSPEC, **changes}), field) == value


@pytest.mark.parametrize(("family", "config", "message"), [
    (DSPARK, {**DEEPSPEC, "architectures": ["Gemma4DSparkModel"]}, r"checkpoint of Gemma4DSparkModel; allowed: DSparkDraft"),
    (DSPARK, {**DEEPSPEC, "architectures": ["DFlashDraftModel"]}, r"checkpoint of DFlashDraftModel"),
    (DSPARK, {**DEEPSPEC, "architectures": None}, r"network without a name"),
    (DSPARK, {**DEEPSPEC, "markov_head_type": "wide"}, r"markov_head_type 'wide'; allowed: vanilla, gated, rnn"),
    (DSPARK, {**DEEPSPEC, "attention_mode": "mha"}, r"attention_mode 'mha' with 32 heads and 8 key heads"),
    (DSPARK, {**DEEPSPEC, "causal": True}, r"causal true, which makes it another network than DSpark"),
    (DSPARK, {**DEEPSPEC, "speculators_model_type": "dspark"}, r"speculators_model_type"),
    (DSPARK, {**DEEPSPEC, "draft_vocab_size": 32000}, r"draft_vocab_size 32000"),
    (DSPARK, {**DEEPSPEC, "dspark_block_size": 5}, r"dspark_block_size 5"),
    (DSPARK, {**DEEPSPEC, "rope_is_neox_style": False}, r"rope_is_neox_style false"),
    (DSPARK, {**DEEPSPEC, "target_layer_ids": [-2]}, r"target_layer_ids \[-2\]"),
    (DFLASH2, {**MUSE, "causal": True}, r"is_causal and causal that contradict"),
    (DFLASH2, {**MUSE, "architectures": ["DFlashDraftModel"]}, r"checkpoint of DFlashDraftModel; allowed: DFlash2DraftModel"),
    (DFLASH2, {**MUSE, "attention_sink_bias": True}, r"attention_sink_bias true"),
    (DFLASH2, {**MUSE, "dflash_config": {**MUSE["dflash_config"], "conv_group_size": 48}}, r"conv_group_size 48"),
    (DFLASH2, {**MUSE, "dflash_config": ROWS}, r"without conv_kernel_size"),
])
def test_refused_configs(tmp_path, family, config, message):
    with pytest.raises(UserError, match=message) as error:
        shape(tmp_path, config, family)
    assert "\n" not in str(error.value)


def test_the_published_shape_of_dflash2(tmp_path):
    found = shape(tmp_path, MUSE, DFLASH2)
    assert (found.block_size, found.num_drafted, found.causal, set(found.sliding)) == (16, 15, False, {2048})
    assert (found.logit_scale, found.logit_softcap, found.selector_top_k) == (0.196, 20.0, 16)
    with torch.device("meta"):
        network = DFLASH2.network(found)
    assert len(network.state_dict()) == 81
    assert sum(parameter.numel() for parameter in network.parameters()) == 632_360_192
    assert shape(tmp_path, {**MUSE, "is_causal": None}, DFLASH2).causal is None


def published(shape):
    """The published spelling of a shape, in SpecForge's layout."""
    config = checkpoint.to_config(shape)
    own = {"conv_kernel_size": shape.kernel_size, "conv_group_size": shape.group_size, "selector_rank": shape.selector_rank,
           "selector_top_k": shape.selector_top_k} if hasattr(shape, "selector_rank") else {
        "projector_type": "dspark", "markov_rank": shape.markov_rank, "markov_head_type": shape.markov_head}
    name = "DFlash2DraftModel" if hasattr(shape, "selector_rank") else "DSparkDraftModel"
    return {**config, "architectures": [name], "vocab_size": shape.vocab_size,
            "dflash_config": {**config["dflash_config"], **own}}


@pytest.fixture
def saved(tmp_path):
    """saved(kind): a random network, the folder that it is saved in, and its family."""
    def write(kind):
        network = random_network(shape_of(kind, random_model("qwen3"), 5, 60))
        family = DFLASH2 if kind == "dflash2" else DSPARK
        checkpoint.save(network, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **published(network.shape)}))
        return network, tmp_path, family
    return write


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(saved, kind):
    network, folder, family = saved(kind)
    loaded = checkpoint.load(folder, None, "cpu", family)
    assert loaded.shape == network.shape
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in network.state_dict().items())


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop("markov_head.markov_w2.weight"), r"lacks markov_head.markov_w2.weight; allowed: all"),
    (lambda tensors: tensors.update({"markov_head.gate_proj.weight": torch.zeros(2)}), r"that DSpark lacks: markov"),
    (lambda tensors: tensors.update({"d2t": torch.zeros(2)}), r"DSpark lacks: d2t"),
])
def test_tensors_are_read_strictly(saved, change, message):
    _, folder, family = saved("vanilla")
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        checkpoint.load(folder, None, "cpu", family)


def test_the_old_prefix_of_the_heads_is_read_and_a_confidence_head_is_not(saved):
    network, folder, family = saved("rnn")
    rewrite(folder, lambda tensors: [tensors.update({f"logit_head.{name}": tensors.pop(name)})
                                     for name in list(tensors) if name.startswith("markov")])
    rewrite(folder, lambda tensors: tensors.update({"logit_head.confidence_head.proj.weight": torch.zeros(1, 38),
                                                    "confidence_head.proj.bias": torch.zeros(1)}))
    loaded = checkpoint.load(folder, None, "cpu", family)
    assert torch.equal(loaded.markov_head.joint_proj.bias, network.markov_head.joint_proj.bias)


def test_copies_of_the_target_are_compared_with_it(saved):
    _, folder, family = saved("vanilla")
    model = random_model("qwen3")
    target = {"embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    rewrite(folder, lambda tensors: tensors.update({name: value.detach().bfloat16() for name, value in target.items()}))
    checkpoint.load(folder, None, "cpu", family)
    checkpoint.check_copies(folder, target)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((60, 0), 9.0))
    with pytest.raises(UserError, match=r"has another lm_head.weight than the target: it is a draft for other weights"):
        checkpoint.check_copies(folder, target)


SLOTS = 4


@pytest.fixture(scope="module")
def target():
    return random_model("qwen3")


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def given(network):
    """(base logits, hidden states, tokens before the slots) of one block, as arrays."""
    numbers = np.random.default_rng(1)
    shape = network.shape
    return (numbers.normal(size=(SLOTS, shape.vocab_size)).astype(np.float32),
            numbers.normal(size=(SLOTS, shape.hidden_size)).astype(np.float32), numbers.integers(0, 50, SLOTS))


def by_formula(kind: str, weights: dict, base, hidden, previous):
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    state, rows = np.zeros(w1.shape[1]), []
    for u, h, x in zip(base, hidden, previous, strict=True):
        e = w1[x]
        if kind == "gated":
            e = sigmoid(weights["gate_proj.weight"] @ np.concatenate([h, e]) + weights["gate_proj.bias"]) * e
        if kind == "rnn":
            z = weights["joint_proj.weight"] @ np.concatenate([state, e, h]) + weights["joint_proj.bias"]
            i, c, o = np.split(z, 3)
            e, state = np.tanh(o), sigmoid(i) * state + (1.0 - sigmoid(i)) * np.tanh(c)
        rows.append(u + w2 @ e)
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads(target, kind):
    network = random_network(shape_of(kind, target, SLOTS, 60))
    base, hidden, previous = given(network)
    weights = {name: value.double().numpy() for name, value in network.markov_head.state_dict().items()}
    logits = network.along(*(torch.from_numpy(values)[None] for values in (base, hidden, previous)))[0]
    assert np.abs(logits.numpy() - by_formula(kind, weights, base, hidden, previous)).max() < 1e-4


def test_without_heads_it_is_the_networks_law(target):
    network = random_network(shape_of("independent", target, SLOTS, 60))
    base, hidden, previous = (torch.from_numpy(values)[None] for values in given(network))
    assert torch.equal(network.along(base, hidden, previous), base)


DRAWN = torch.tensor([[2, 0], [1, 1], [0, 2]])
"""The tokens that are drawn in three slots of two rows."""


class Given(SlotwiseDrafter):
    """Gets its hidden states from the test."""

    states: torch.Tensor

    def hidden(self, anchors):
        return self.states


def proposal(kind: str):
    """The drafter, its hidden states, and the logits of each slot that it has given to `draw`."""
    table, given = small_table(), []
    drafter = Given(random_network(shape_of(kind, table.parts, 3 + (kind == "dflash2"), 2)), table.parts)
    drafter.states = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(4))

    def draw(logits, first):
        given.append(logits[:, 0])
        return DRAWN[first][:, None]

    anchors = Anchors(slice(0, 2), None, torch.tensor([[0, 1], [1, 2]]), torch.tensor([1, 1]), 2)
    drafted = drafter.propose(anchors, draw)
    assert torch.equal(drafted, DRAWN.t())
    return drafter, given


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "dflash2"])
def test_each_slot_is_drawn_from_its_corrected_logits(kind):
    drafter, given = proposal(kind)
    previous = torch.cat([torch.tensor([[1], [2]]), DRAWN.t()[:, :2]], dim=1)
    expected = drafter.network.along(drafter.logits(drafter.states), drafter.states, previous)
    assert all(torch.equal(logits, expected[:, slot]) for slot, logits in enumerate(given))
