"""Checkpoints of drafts: all published spellings are read, a saved draft is read back, and other networks are refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_mcmc.draft.network.checkpoint import DFLASH, check_pair, default_target_layers, load, save
from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from dflash_mcmc.errors import ConfigError, UserError

QWEN3_4B = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 9728, "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960,
    "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "transformers_version": "4.57.3", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}
SMALL = DFlashShape(
    hidden_size=24, num_layers=2, num_heads=4, num_key_heads=2, head_dim=8, intermediate_size=40, block_size=5,
    mask_token_id=7, target_layers=(1, 4, 2), num_target_layers=6, rope={"rope_type": "default", "rope_theta": 10_000.0},
    max_positions=256, sliding=(None, None),
)
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
EVERYTHING = dataclasses.replace(
    SMALL, num_layers=3, sliding=(6, None, 6), bias=True, rope=YARN, num_target_layers=None, norm_eps=1e-5,
    embedding_scale=4.9, logit_scale=0.196, logit_softcap=20.0, dtype=torch.bfloat16,
)


def config_with(*absent: str, **changes) -> dict:
    """The published config with some fields changed and the fields `absent` left out.

    A field of dflash_config is written as `dflash__name`.
    """
    config = {name: value for name, value in QWEN3_4B.items() if name not in absent}
    own = {name.removeprefix("dflash__"): value for name, value in changes.items() if name.startswith("dflash__")}
    config.update({name: value for name, value in changes.items() if not name.startswith("dflash__")})
    return {**config, "dflash_config": {**config["dflash_config"], **own}} if own else config


def write_config(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def written(folder: Path, shape: DFlashShape = SMALL) -> tuple[DFlash, Path]:
    """A random draft, and the folder in which it is saved."""
    with torch.random.fork_rng():
        draft = DFlash(shape).to(shape.dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    save(draft, folder, {"vocab_size": 61, "hidden_size": -1})
    return draft, folder


def test_the_published_config(tmp_path):
    shape = DFLASH.read_shape(write_config(tmp_path, QWEN3_4B))
    assert shape == DFlashShape(
        hidden_size=2560, num_layers=5, num_heads=32, num_key_heads=8, head_dim=128, intermediate_size=9728, block_size=16,
        mask_token_id=151669, target_layers=(1, 9, 17, 25, 33), num_target_layers=36, norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1000000}, max_positions=40960, sliding=(None,) * 5, dtype=torch.bfloat16,
    )


SLIDING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]


@pytest.mark.parametrize(("config", "field", "value"), [
    (config_with("block_size", dflash__block_size=10), "block_size", 10),
    (config_with("block_size"), "block_size", 16),
    (config_with(dflash_config={"target_layer_ids": [0, 3]}, mask_token_id=4), "mask_token_id", 4),
    (config_with(dflash_config={"mask_token_id": 0}, target_layer_ids=[5, 3]), "target_layers", (5, 3)),
    (config_with(dflash_config={"mask_token_id": 0}), "target_layers", (1, 9, 17, 25, 33)),
    (config_with(dflash_config={"mask_token_id": 0}, num_hidden_layers=1, layer_types=None), "target_layers", (18,)),
    (config_with("num_target_layers"), "num_target_layers", None),
    (config_with(dflash__target_layer_ids=[1, 2, 3, 4, 5, 6, 7, 8]), "target_layers", (1, 2, 3, 4, 5, 6, 7, 8)),
    (config_with("rope_theta", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "rope",
     {"rope_type": "default", "rope_theta": 5e5}),
    (config_with("rope_theta", "rope_scaling", rope_parameters=YARN), "rope", YARN),
    (config_with(rope_scaling={"type": "linear", "factor": 2.0}), "rope",
     {"rope_type": "linear", "rope_theta": 1000000, "factor": 2.0}),
    (config_with(attention_bias=True), "bias", True),
    (config_with(layer_types=SLIDING, sliding_window=2048, use_sliding_window=True), "sliding",
     (2048, None, 2048, None, 2048)),
    (config_with("use_sliding_window", layer_types=SLIDING, sliding_window=9), "sliding", (9, None, 9, None, 9)),
    (config_with("layer_types", sliding_window=9), "sliding", (None,) * 5),
    (config_with("layer_types", sliding_window=9, use_sliding_window=True, max_window_layers=3), "sliding",
     (None, None, None, 9, 9)),
    (config_with(is_causal=False, dflash__causal=False), "sliding", (None,) * 5),
    (config_with(dflash__input_embedding_scale=50), "embedding_scale", 50.0),
    (config_with(final_logit_softcapping=30.0), "logit_softcap", 30.0),
    (config_with(dflash__final_logit_softcapping=0.0), "logit_softcap", None),
    (config_with("head_dim"), "head_dim", 80),
    (config_with("num_key_value_heads"), "num_key_heads", 32),
    (config_with("dtype", torch_dtype="float16"), "dtype", torch.float16),
    (config_with("architectures", "hidden_act", "model_type"), "activation", "silu"),
])
def test_spellings_of_a_config(tmp_path, config, field, value):
    assert getattr(DFLASH.read_shape(write_config(tmp_path, config)), field) == value


@pytest.mark.parametrize(("num_target_layers", "num_layers", "layers"), [
    (36, 5, (1, 9, 17, 25, 33)), (32, 5, (1, 8, 15, 22, 29)), (64, 5, (1, 16, 31, 46, 61)), (28, 5, (1, 7, 13, 19, 25)),
    (48, 5, (1, 12, 23, 34, 45)), (6, 2, (1, 3)), (37, 1, (18,)),
])
def test_default_layers(num_target_layers, num_layers, layers):
    assert default_target_layers(num_target_layers, num_layers) == layers


@pytest.mark.parametrize(("config", "message"), [
    ([], r"config.json that is no mapping"),
    (config_with(dflash_config=[1]), r"dflash_config is none"),
    (config_with(architectures=["DFlash2DraftModel"]), r"checkpoint of DFlash2DraftModel; allowed: DFlashDraftModel"),
    (config_with(dflash__causal=True), r"causal true, which makes it another network than DFlash; allowed: absent or false"),
    (config_with(is_causal=False, layer_types=SLIDING, sliding_window=9, use_sliding_window=True), r"rows look ahead"),
    (config_with(dflash__projector_type="dspark"), r'projector_type "dspark"'),
    (config_with(dflash__sample_from_anchor=True), r"sample_from_anchor true"),
    (config_with(quantization_config={"bits": 4}), r"quantization_config"),
    (config_with(speculators_model_type="eagle3"), r'speculators_model_type "eagle3"'),
    (config_with(draft_vocab_size=151937), r"draft_vocab_size 151937; allowed: an integer >= 1 and <= 151936"),
    (config_with("vocab_size", draft_vocab_size=32000), r"without vocab_size"),
    (config_with(hidden_act="gelu"), r'hidden_act "gelu".*allowed: absent or "silu"'),
    (config_with(dflash_config={"target_layer_ids": [1]}), r"without mask_token_id"),
    (config_with(hidden_size="2560"), r"hidden_size '2560'; allowed: an integer >= 1"),
    (config_with(intermediate_size=2**62), r"intermediate_size 4611686018427387904; allowed: an integer >= 1 and <= 16777216"),
    (config_with(output_multiplier=10**400), r"output_multiplier 10+; allowed: a number"),
    (config_with(rms_norm_eps=float("nan")), r"rms_norm_eps nan; allowed: a number"),
    (config_with(block_size=1), r"block_size 1; allowed: an integer >= 2"),
    (config_with(dflash__target_layer_ids=[]), r"target_layer_ids \[\]"),
    (config_with(dflash__target_layer_ids=[-1, 3]), r"target_layer_ids \[-1, 3\]"),
    (config_with(dflash__target_layer_ids=[1, 36]), r"target_layer_ids up to 36; allowed: 0 to 35"),
    (config_with(num_key_value_heads=3), r"32 heads, 3 key heads"),
    (config_with("rope_theta"), r"without rope_theta"),
    (config_with("rope_theta", rope_parameters={"full_attention": {"rope_theta": 1e6}}), r"without rope_theta"),
    (config_with(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), r"rope_type 'dynamic'; allowed: default, linear"),
    (config_with(rope_scaling="x"), r"has rope_scaling 'x'; allowed: parameters, as in"),
    (config_with(rope_parameters={}), r"has rope_parameters \{\}; allowed: parameters, as in"),
    (config_with(rope_theta=0), r"has rope_theta 0; allowed: a number > 0"),
    (config_with(rope_theta=float("nan")), r"has rope_theta nan; allowed: a number > 0"),
    (config_with("rope_theta", "rope_scaling", rope_parameters={**YARN, "factor": -1.0}),
     r"has rope_parameters.factor -1.0; allowed: a number > 0"),
    (config_with(rope_scaling={"rope_type": "linear"}), r"rotation that cannot be computed.*allowed: what rope_type linear"),
    (config_with(partial_rotary_factor=0.25), r"partial_rotary_factor"),
    (config_with(layer_types=["full_attention"]), r"layer_types .*for 5 layers"),
    (config_with(layer_types=SLIDING, sliding_window=9), r"use_sliding_window false; allowed: true or absent"),
    (config_with(layer_types=SLIDING, use_sliding_window=True), r"without sliding_window"),
    (config_with(dtype="int8"), r"dtype 'int8'; allowed: float32"),
])
def test_refused_configs(tmp_path, config, message):
    with pytest.raises(UserError, match=message) as caught:
        DFLASH.read_shape(write_config(tmp_path, config))
    assert_one_line(caught.value, tmp_path)


def assert_one_line(error: UserError, folder: Path) -> None:
    """Checks that the error is one line with the field, the folder and the allowed values."""
    text = str(error)
    assert text.startswith("draft.path: ")
    assert "; allowed: " in text
    assert str(folder) in text
    assert "\n" not in text


def test_refused_folders(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"allowed: the folder of a DFlash checkpoint") as caught:
            DFLASH.read_shape(folder)
        assert_one_line(caught.value, folder)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ConfigError, match=r"config.json is JSON") as caught:
        DFLASH.read_shape(tmp_path)
    assert_one_line(caught.value, tmp_path)


@pytest.mark.parametrize("shape", [SMALL, EVERYTHING], ids=["plain", "everything"])
def test_what_is_saved_is_loaded(tmp_path, shape):
    draft, folder = written(tmp_path / "new", shape)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert DFLASH.read_shape(folder) == shape
    loaded = load(folder, None, "cpu")
    assert loaded.shape == shape
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
        assert loaded.state_dict()[name].dtype == shape.dtype
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["vocab_size"]) == (["DFlashDraftModel"], "qwen3", 61)
    save(loaded, folder)
    assert DFLASH.read_shape(folder) == shape


def test_a_load_in_bfloat16_keeps_the_rotation_in_float32(tmp_path):
    draft, folder = written(tmp_path)
    low = load(folder, torch.bfloat16, "cpu")
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    positions = torch.tensor([[0, 255, 40_000]])
    for ours, theirs in zip(low.rotation(positions, torch.float32), draft.rotation(positions, torch.float32), strict=True):
        assert torch.equal(ours, theirs)
    assert load(folder, None, "cpu").fc.weight.dtype == torch.float32


@pytest.mark.usefixtures("random_weights")
def test_different_windows_have_no_published_spelling(tmp_path):
    with pytest.raises(UserError, match=r"windows \[4, 6\]; allowed: one window"):
        save(DFlash(dataclasses.replace(SMALL, sliding=(4, 6))), tmp_path)


def shard(folder: Path) -> None:
    """Splits a saved draft into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_loaded(tmp_path):
    draft, folder = written(tmp_path)
    shard(folder)
    loaded = load(folder, None, "cpu").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in draft.state_dict().items())


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename(old: str, new: str):
    def change(tensors):
        tensors[new] = tensors.pop(old)
    return change


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"lacks layers.1.mlp.up_proj.weight; allowed: all 25 tensors"),
    (lambda t: [t.pop(name) for name in list(t) if "layers.1." in name], r"lacks .*, .*, .* and 8 more"),
    (lambda t: t.update({"lm_head.bias": torch.ones(2)}), r"tensors that DFlash lacks: lm_head.bias"),
    (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(32)}), r"lacks: layers.0.self_attn.q_proj.bias"),
    (lambda t: t.update({"markov_head.weight": torch.ones(2)}), r"lacks: markov_head.weight"),
    (rename("fc.weight", "encoder.fc.weight"), r"lacks: encoder.fc.weight"),
    (lambda t: t.update({"candidate_selector.hidden_projection.weight": torch.ones(2)}), r"is a DFlash 2 checkpoint"),
    (lambda t: t.update({"layers.0.attention_conv.base_kernel": torch.ones(2)}), r"is a DFlash 2 checkpoint"),
    (lambda t: t.update({"fc.weight": torch.ones(24, 48)}), r"fc.weight of shape \(24, 48\); allowed: \(24, 72\)"),
    (lambda t: t.update({"norm.weight": torch.ones(24, dtype=torch.int8)}), r"norm.weight in I8; allowed: F32, F16, BF16"),
])
def test_refused_tensors(tmp_path, change, message):
    _, folder = written(tmp_path)
    change_tensors(folder, change)
    with pytest.raises(UserError, match=message) as caught:
        load(folder, None, "cpu")
    assert_one_line(caught.value, folder)


def test_refused_files(tmp_path):
    _, folder = written(tmp_path)
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = weights.read_bytes()
    for torn in (whole[:-4], whole[:100], whole[:4], b""):
        weights.write_bytes(torn)
        with pytest.raises(UserError, match=r"file model.safetensors that is not whole") as caught:
            load(folder, None, "cpu")
        assert_one_line(caught.value, folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"has no model.safetensors; allowed: that file, or shards"):
        load(folder, None, "cpu")
    index.write_text("[]")
    with pytest.raises(UserError, match=r"index.json that cannot be read"):
        load(folder, None, "cpu")
    weights.write_bytes(whole)
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"file b.safetensors that is not there"):
        load(folder, None, "cpu")


def test_pairs():
    fitting = dict(hidden_size=24, vocab_size=8, num_layers=6)
    check_pair(SMALL, **fitting)
    check_pair(dataclasses.replace(SMALL, num_target_layers=None), **{**fitting, "num_layers": 5})
    for change, message in (
        ({"hidden_size": 32}, "draft.path: the draft has hidden size 24; allowed: 32, the target's"),
        ({"vocab_size": 7}, "draft.path: the draft has mask_token_id 7; allowed: an id below 7, the size of the target's "
                            "vocabulary"),
        ({"num_layers": 8}, "draft.path: the draft was trained for a target of 6 layers; allowed: 8, the target's"),
    ):
        with pytest.raises(UserError) as caught:
            check_pair(SMALL, **{**fitting, **change})
        assert str(caught.value) == message
    with pytest.raises(UserError, match=r"^model.draft: the draft reads layer 4 .*allowed: 0 to 3, the target's layers"):
        check_pair(dataclasses.replace(SMALL, num_target_layers=None), **{**fitting, "num_layers": 4}, field="model.draft")
