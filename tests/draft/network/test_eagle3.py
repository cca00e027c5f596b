"""EAGLE-3 against its published definition, written out, in the three published layouts; and what is refused."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.checkpoint import check_copies, check_pair
from dflash_mcmc.draft.network.eagle3 import FAMILY
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner, Span
from dflash_mcmc.engine.speculative.drafter import Anchors, EagleDrafter
from dflash_mcmc.errors import UserError
from tests.draft.network.test_checkpoint import assert_one_line, write_config
from tests.targets import random_model

HEADS, KEY_HEADS, DIM, INNER, THETA = 4, 2, 8, 40, 1e4


class Layout(NamedTuple):
    """A checkpoint in memory: config.json, tensors by their published names, and the definition's choices."""

    config: dict
    tensors: dict[str, torch.Tensor]
    layer: str = "midlayer"
    taps: tuple[int, ...] | None = None
    """Decoder layers; None for those of SafeAILab's code."""

    def is_set(self, flag: str) -> bool:
        return bool(self.config.get(flag))

    def ids(self) -> np.ndarray:
        """The target's ids of the draft's tokens."""
        places = np.arange(len(self.tensors["lm_head.weight"]))
        return places + self.tensors["d2t"].numpy() if "d2t" in self.tensors else places


def layout(name: str, model: torch.nn.Module, ids: list[int] | None, taps: tuple[int, ...] | None = None, seed: int = 0,
           **flags) -> Layout:
    """A random draft for a target. With `ids` its vocabulary is reduced."""
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    generator, prefix = torch.Generator().manual_seed(seed), "layers.0" if name == "speculators" else "midlayer"
    qwen3, bias = flags.pop("model_type", "llama") == "qwen3", flags.get("attention_bias", False)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return torch.empty(size).uniform_(0.5, 1.5, generator=generator)

    tensors = {"fc.weight": matrix(hidden, 3 * hidden), "norm.weight": norm(hidden),
               "lm_head.weight": matrix(len(ids) if ids else vocabulary, hidden, 2.0)}
    for norm_name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{norm_name}.weight"] = norm(hidden)
    for part, rows, columns in (("q", HEADS * DIM, 2 * hidden), ("k", KEY_HEADS * DIM, 2 * hidden),
                                ("v", KEY_HEADS * DIM, 2 * hidden), ("o", hidden, HEADS * DIM)):
        tensors[f"{prefix}.self_attn.{part}_proj.weight"] = matrix(rows, columns, 2.0)
        if bias:
            tensors[f"{prefix}.self_attn.{part}_proj.bias"] = matrix(1, rows)[0]
    if qwen3:
        tensors |= {f"{prefix}.self_attn.{part}_norm.weight": norm(DIM) for part in "qk"}
    for part, shape in (("gate", (INNER, hidden)), ("up", (INNER, hidden)), ("down", (hidden, INNER))):
        tensors[f"{prefix}.mlp.{part}_proj.weight"] = matrix(*shape)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * hidden)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": norm(hidden) for number in range(3)}
    if ids:
        tensors |= {"d2t": torch.tensor(ids) - torch.arange(len(ids)),
                    "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)}
    network = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
               "num_key_value_heads": KEY_HEADS, "head_dim": DIM, "num_hidden_layers": 1, "hidden_act": "silu",
               "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "attention_bias": bias}
    outer = {"draft_vocab_size": len(ids) if ids else vocabulary, "torch_dtype": "float32"}
    if name == "speculators":
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], **outer, "dtype": "float32",
                  "norm_before_residual": False, **flags, "transformer_layer_config": {
                      **network, "model_type": "qwen3" if qwen3 else "llama", "rope_theta": THETA}}
        if taps:
            config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in taps]
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **network, **outer, **flags}
        if taps:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    return Layout(config, tensors, prefix, taps)


def stored(made: Layout, folder: Path, pickled: bool = False) -> Path:
    write_config(folder, made.config)
    if pickled:
        torch.save(made.tensors, folder / "pytorch_model.bin")
    else:
        save_file(made.tensors, folder / "model.safetensors")
    return folder


class Published:
    """The definition: all tokens are read again for each drafted one, in float64, without a cache."""

    def __init__(self, made: Layout, model: torch.nn.Module):
        self._made, self._model = made, model
        self._tensors = {name: tensor.double() for name, tensor in made.tensors.items()}
        self.logits = functools.cache(self._logits)

    def _logits(self, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        """Logits, float64 (vocabulary,), of the token after `prefix` and `drafted`. The target has read all but the anchor."""
        made, embedding = self._made, self._model.get_input_embeddings().weight.detach().double()
        states = self._fused(prefix[:-1])
        for count in range(len(drafted) + 1):
            tokens = torch.tensor((*prefix[1:], *drafted[:count]))
            out = self._layer(embedding[tokens], states)
            normed = self._norm("norm", out[-1:])
            states = torch.cat([states, normed if made.is_set("norm_output") else out[-1:]])
        whole = np.full(self._model.config.vocab_size, -np.inf)
        whole[made.ids()] = (normed[0] @ self._tensors["lm_head.weight"].T).numpy()
        return whole

    def _fused(self, tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            read = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        layers = len(read) - 1
        parts = [read[tap + 1][0].double() for tap in self._made.taps or (1, layers // 2 - 1, layers - 4)]
        if self._made.is_set("fc_norm"):
            parts = [self._norm(f"fc_norm.{number}", part) for number, part in enumerate(parts)]
        joined = torch.cat(parts, dim=-1)
        if self._made.is_set("norm_before_fc"):
            joined = self._norm("input_norm", joined)
        return joined @ self._tensors["fc.weight"].T

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The decoder layer over pairs of a token and the state before it, each (n, hidden)."""
        prefix = self._made.layer
        normed = self._norm(f"{prefix}.hidden_norm", states)
        inputs = torch.cat([self._norm(f"{prefix}.input_layernorm", embedded), normed], dim=-1)
        heads = {part: self._linear(f"{prefix}.self_attn.{part}_proj", inputs).unflatten(-1, (-1, DIM)) for part in "qkv"}
        for part in "qk":
            if f"{prefix}.self_attn.{part}_norm.weight" in self._tensors:
                heads[part] = self._norm(f"{prefix}.self_attn.{part}_norm", heads[part])
            heads[part] = self._rotated(heads[part])
        groups = HEADS // KEY_HEADS
        keys, values = (heads[part].repeat_interleave(groups, dim=1) for part in "kv")
        scores = torch.einsum("ihd,jhd->hij", heads["q"], keys) / DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), values).flatten(1)
        residual = normed if self._made.is_set("norm_before_residual") else states
        hidden = residual + self._linear(f"{prefix}.self_attn.o_proj", attended)
        inner = self._norm(f"{prefix}.post_attention_layernorm", hidden)
        gate, up = (inner @ self._tensors[f"{prefix}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return hidden + (torch.nn.functional.silu(gate) * up) @ self._tensors[f"{prefix}.mlp.down_proj.weight"].T

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotates (n, heads, dim) by the places 0, 1, ..., as SafeAILab's code counts them."""
        angles = torch.arange(len(heads)).double()[:, None] * THETA ** (-torch.arange(0, DIM, 2).double() / DIM)
        first, second = heads.chunk(2, dim=-1)
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", torch.zeros(1).double())

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * self._tensors[f"{name}.weight"]


def drafter_of(folder: Path, target: LanguageModel, num_drafted: int) -> EagleDrafter:
    return EagleDrafter(checkpoint.load(folder, None, "cpu", FAMILY), target, num_drafted)


@torch.inference_mode()
def proposed(drafter: EagleDrafter, prefix: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
    """Logits (slots, vocabulary) that the drafter gives after `prefix` when `drafted` is drawn."""
    target, length, last = drafter.target, 128, len(prefix) - 1
    cache = KVCache(target.cache_shape, 2, length, companions=(drafter.companion,))
    runner = ModelRunner(target, None, "grouped", length, length, 8, drafter)
    found: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, first: int) -> torch.Tensor:
        found.append(logits[0, 0])
        return torch.tensor([[drafted[first] if first < len(drafted) else 0]])

    with runner.ready():
        if last:
            runner.read(cache, [Span(0, np.array(prefix), 0, last)])
        at = Anchors(slice(0, 1), cache, torch.tensor([prefix]), torch.tensor([len(prefix) - 1]), length)
        drafter.propose(at, draw)
    return torch.stack(found).double().numpy()


MODELS = {"seven": functools.cache(lambda: random_model("qwen3", num_hidden_layers=7)),
          "eight": functools.cache(lambda: random_model("llama", num_hidden_layers=8))}
SOME = [7, 3, 60, 0, 12, 33]
LAYOUTS = {
    "SafeAILab": ("safeailab", "seven", SOME, None, {}),
    "SafeAILab whole": ("safeailab", "eight", None, None, {}),
    "SpecForge": ("specforge", "seven", SOME, (0, 4, 2), {}),
    "speculators": ("speculators", "seven", SOME, None, {}),
    "speculators residual": ("speculators", "eight", SOME, (2, 1, 6), {"norm_before_residual": True}),
    "speculators Qwen3": ("speculators", "seven", None, None, {"model_type": "qwen3", "attention_bias": True}),
    "speculators norms": ("speculators", "seven", SOME, (0, 2, 5), {"fc_norm": True, "norm_output": True}),
    "speculators joint norm": ("speculators", "seven", SOME, None, {"norm_before_fc": True}),
}


def made(name: str) -> tuple[Layout, torch.nn.Module]:
    kind, target, ids, taps, flags = LAYOUTS[name]
    model = MODELS[target]()
    return layout(kind, model, ids, taps, **flags), model


@pytest.mark.parametrize("name", LAYOUTS)
def test_laws_are_those_of_the_definition(tmp_path, name):
    """Of blocks after prefixes that are read in one piece or in several, of two tokens or of many."""
    chosen, model = made(name)
    published = Published(chosen, model)
    drafter = drafter_of(stored(chosen, tmp_path, pickled=name == "SafeAILab"), LanguageModel(model), 4)
    tokens = tuple(np.random.default_rng(1).integers(0, 61, 30).tolist())
    for length in (2, 3, 9, 21):
        prefix, drafted = tokens[:length], tokens[length : length + 3]
        found = proposed(drafter, prefix, drafted)
        expected = np.stack([published.logits(prefix, drafted[:count]) for count in range(4)])
        lacks = ~np.isfinite(expected)
        assert (found[lacks] == -np.inf).all()
        assert np.abs(found[~lacks] - expected[~lacks]).max() < 3e-5
    assert len(set(chosen.ids())) == (61 if drafter.network.shape.draft_vocab_size is None else len(SOME))


def test_a_prompt_of_one_token_has_a_law(tmp_path):
    """The published code has none there. Any fixed law is right; this one has no features before the token."""
    chosen, model = made("SpecForge")
    found = proposed(drafter_of(stored(chosen, tmp_path), LanguageModel(model), 2), (5,), (7,))
    assert np.isfinite(found[:, SOME]).all()


# Reading.


@pytest.mark.parametrize(("changes", "field", "value"), [
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 2]}}, "target_layers", (1, 3, 2)),
    ({"eagle_config": None}, "target_layers", ()),
    ({"rope_theta": 5e5}, "rope", {"rope_type": "default", "rope_theta": 5e5}),
    ({}, "rope", {"rope_type": "default", "rope_theta": 1e4}),
    ({"architectures": ["LlamaForCausalLM"]}, "draft_vocab_size", 6),
    ({"draft_vocab_size": 61}, "draft_vocab_size", None),
], ids=str)
def test_spellings(tmp_path, changes, field, value):
    config = made("SpecForge")[0].config
    assert getattr(FAMILY.read_shape(write_config(tmp_path, {**config, **changes})), field) == value


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("SpecForge", {"architectures": ["DFlashDraftModel"]}, r"checkpoint of DFlashDraftModel; allowed: LlamaForCausalLMEagle3"),
    ("SpecForge", {"draft_vocab_size": None}, r"without draft_vocab_size"),
    ("SpecForge", {"num_hidden_layers": 2}, r"num_hidden_layers 2, which makes it another network than EAGLE-3; allowed: .*1"),
    ("SpecForge", {"fc_norm": True}, r"fc_norm true"),
    ("SpecForge", {"norm_output": True}, r"norm_output true"),
    ("SpecForge", {"model_type": "qwen3"}, r'model_type "qwen3"'),
    ("SpecForge", {"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state false"),
    ("SpecForge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, r"reads 2 layers of the target; allowed: 3"),
    ("SpecForge", {"eagle_config": [1]}, r"whose eagle_config is none"),
    ("SpecForge", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"eagle_aux_hidden_state_layer_ids \[1, 2, 3\]"),
    ("SpecForge", {"target_hidden_size": 64}, r"target_hidden_size 64; allowed: hidden_size, which is 32"),
    ("SpecForge", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type 'dynamic'"),
    ("speculators", {"norm_before_residual": None}, r"no norm_before_residual, whose default differs between engines"),
    ("speculators", {"speculators_model_type": "mtp"}, r"checkpoint of Eagle3Speculator; allowed: .*type eagle3"),
    ("speculators", {"parallel_drafting": True}, r"parallel_drafting true"),
], ids=str)
def test_refused_configs(tmp_path, name, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        FAMILY.read_shape(write_config(tmp_path, {**made(name)[0].config, **changes}))
    assert_one_line(caught.value, tmp_path)


def test_refused_targets():
    chosen, _ = made("SpecForge")
    shape = functools.partial(_shape_of, chosen.config)
    fitting = dict(hidden_size=32, vocab_size=61, num_layers=7)
    check_pair(shape(), **fitting)
    for changes, other, message in (
        ({}, {"num_layers": 4}, r"reads layer 4 of the target; allowed: 0 to 3"),
        ({"eagle_config": None}, {"num_layers": 6}, r"reads layers 1, L / 2 - 1 and L - 4 of the target, which has 6 layers"),
        ({}, {"vocab_size": 62}, r"tensors for a vocabulary of 61; allowed: 62"),
        ({}, {"hidden_size": 16}, r"hidden size 32; allowed: 16"),
    ):
        with pytest.raises(UserError, match=message):
            check_pair(shape(**changes), **{**fitting, **other})


def _shape_of(config: dict, **changes):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return FAMILY.read_shape(write_config(Path(folder), {**config, **changes}))


def test_refused_tensors(tmp_path):
    chosen, model = made("SpecForge")
    embedding = model.get_input_embeddings().weight.detach().clone()
    folder = stored(chosen._replace(tensors={**chosen.tensors, "embed_tokens.weight": embedding}), tmp_path / "copy")
    checkpoint.load(folder, None, "cpu", FAMILY)
    check_copies(folder, {"embed_tokens.weight": embedding})
    with pytest.raises(UserError, match=r"another embed_tokens.weight than the target"):
        check_copies(folder, {"embed_tokens.weight": embedding + 1.0})
    for number, (change, message) in enumerate((
        (lambda t: t.pop("fc.weight"), r"lacks fc.weight"),
        (lambda t: t.pop("d2t"), r"lacks d2t"),
        (lambda t: t.update({"d2t": t["d2t"] + 1}), r"d2t that maps no two tokens"),
        (lambda t: t.update({"markov_head.weight": torch.zeros(2)}), r"tensors that EAGLE-3 lacks: markov_head.weight"),
    )):
        tensors = dict(chosen.tensors)
        change(tensors)
        folder = stored(chosen._replace(tensors=tensors), tmp_path / str(number), pickled=number % 2 == 0)
        with pytest.raises(UserError, match=message) as caught:
            checkpoint.load(folder, None, "cpu", FAMILY)
        assert_one_line(caught.value, folder)


def test_a_file_of_more_than_tensors_is_refused(tmp_path):
    folder = write_config(tmp_path, made("SpecForge")[0].config)
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin that is not whole, or holds more than tensors") as caught:
        checkpoint.load(folder, None, "cpu", FAMILY)
    assert_one_line(caught.value, folder)
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == len(SOME)
