"""Families whose layers differ from full attention: batched engine = reference engine = a fresh forward of transformers.

Each model is random, has both kinds of layers, and windows or chunks of 8 tokens. Texts have 20 to 40 tokens.
"""

import functools

import numpy as np
import pytest
import torch
import transformers

from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching import attention, language_model
from dflash_mcmc.engine.batching.attention import FULL, Reach
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import TargetShape
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.rng import Key
from tests.cases import quick
from tests.engine.batching.test_batched import power_mh, temperature
from tests.engine.speculative.test_speculator import drafter, match
from tests.targets import RememberingReference, random_model, randomised, rows_do_not_depend_on_the_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*rope_parameters.*")
CPU = torch.device("cpu")
WINDOW, HORIZON, STOPS, TOLERANCE = 8, 12, (3, 7, 20), 1e-4
PROMPTS = [np.arange(length) * 7 % 61 for length in (20, 28, 23)]
LONGEST = 28 + HORIZON
_SHAPE = dict(vocab_size=61, eos_token_id=3, bos_token_id=None, pad_token_id=None, hidden_size=32, intermediate_size=48,
              num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=192,
              tie_word_embeddings=False)
_BOTH = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
_EXPERTS = dict(num_experts_per_tok=2, num_experts=4, num_local_experts=4, moe_intermediate_size=48)
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LAYERS = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": _YARN}
_MADE = {
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _BOTH),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(**_BOTH, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", dict(**_BOTH, rope_parameters=_LAYERS)),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(sliding_window=WINDOW)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(sliding_window=WINDOW, use_sliding_window=True, max_window_layers=2)),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", dict(**_BOTH, **_EXPERTS, rope_parameters=_YARN)),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig",
               dict(attention_chunk_size=WINDOW, intermediate_size_mlp=48, num_experts_per_tok=1, num_local_experts=4)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", dict(
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48, first_k_dense_replace=1,
        kv_lora_rank=12, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8, head_dim=4,
        num_key_value_heads=4)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", _EXPERTS),
    "llama_yarn": ("LlamaForCausalLM", "LlamaConfig", dict(max_position_embeddings=16, rope_parameters=_YARN)),
}
WINDOWED = ("gemma3", "gemma2", "olmo3", "mistral", "qwen2", "gpt_oss", "llama4")
_SLOW = ("gemma3", "olmo3", "mistral", "qwen2", "llama4", "deepseek_v3", "qwen3_moe", "olmoe", "llama_yarn")
"""Families whose kinds of layers others have, too."""
MIXTURES = ("qwen3_moe", "olmoe", "gpt_oss")


@functools.cache
def model_of(family: str) -> torch.nn.Module:
    model, config, changes = _MADE[family]
    return randomised(lambda: getattr(transformers, model)(getattr(transformers, config)(**{**_SHAPE, **changes})))


def chains(sampler, count=6):
    for index in range(count):
        yield index, sampler.chain(PROMPTS[index % len(PROMPTS)], HORIZON, Key(5).fold_in(index))


def drawn(parts, sampler, slots=8, blend=None, speculation=None, count=6, **options):
    engine = BatchedEngine(parts, blend or NoBlend(), slots, LONGEST, Options(**options), None, speculation)
    return {done.tag: done.result for done in engine.run(chains(sampler, count))}


def fresh(model, path) -> np.ndarray:
    """log p of a trajectory's tokens from one forward of transformers' own model, without a cache."""
    tokens = torch.from_numpy(np.concatenate([path.prompt, path.tokens]))
    with torch.inference_mode():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(path.prompt) - 1 : -1].double()
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[len(path.prompt) :, None])[:, 0].numpy()


def assert_near(found, expected, tolerance=TOLERANCE):
    assert found.keys() == expected.keys()
    for tag, result in expected.items():
        assert found[tag].trajectory.tokens.tolist() == result.trajectory.tokens.tolist()
        np.testing.assert_allclose(found[tag].trajectory.log_p, result.trajectory.log_p, atol=tolerance, rtol=0)
        assert (found[tag].accepted, found[tag].moved) == (result.accepted, result.moved)


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in _MADE])
def test_batched_is_reference_is_a_fresh_forward(family):
    """Plain sampling, and power_mh, whose rejected proposals are rolled back."""
    model = model_of(family)
    parts = LanguageModel(model, stop_ids=STOPS)
    reference = RememberingReference(model, parts, NoBlend())
    for sampler in (temperature(), power_mh(proposal="matched")):
        expected = {tag: reference.run(chain) for tag, chain in chains(sampler, 3)}
        found = drawn(parts, sampler, count=3)
        assert_near(found, expected)
        for result in found.values():
            np.testing.assert_allclose(result.trajectory.log_p, fresh(model, result.trajectory), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", quick([*WINDOWED, "qwen3_moe", "llama_yarn"], "gpt_oss"))
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_every_implementation_draws_the_same(family, name):
    model = model_of(family)
    parts, before = LanguageModel(model, stop_ids=STOPS), model.config._attn_implementation
    if name == "sdpa" and parts.changes_scores:
        with pytest.raises(ConfigError, match=r"hardware.attention: given 'sdpa'; allowed: auto, grouped, eager for a model"):
            drawn(parts, temperature(), attention=name)
    else:
        assert_near(drawn(parts, temperature(), attention=name), drawn(parts, temperature()))
        assert model.config._attn_implementation == before


def test_sinks_and_soft_caps_take_grouped_attention():
    assert attention.implementation("auto", torch.device("cuda"), True) == "grouped"
    for family, found in (("gemma3", False), ("gpt_oss", True), ("gemma2", True), ("olmoe", False)):
        model = model_of(family)
        assert LanguageModel(model).changes_scores == found
        assert TargetShape(model.config, CPU, torch.float32, None).changes_scores == found


@pytest.mark.parametrize("family", _MADE)
def test_the_plan_before_the_weights_are_loaded_knows_the_keys(family):
    model = model_of(family)
    assert TargetShape(model.config, CPU, torch.float32, None).cache_shape == LanguageModel(model).cache_shape


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_a_blend_comes_before_the_soft_cap(family):
    model, blend = model_of(family), LayerBlend(beta=0.3, layer=1, norm="final")
    parts = LanguageModel(model, stop_ids=STOPS)
    reference = RememberingReference(model, parts, blend)
    expected = {tag: reference.run(chain) for tag, chain in chains(temperature(), 3)}
    assert_near(drawn(parts, temperature(), blend=blend, count=3), expected)


@pytest.mark.parametrize("family", quick(["gemma3", "gpt_oss"], "gpt_oss"))
@pytest.mark.parametrize("draft", ["dflash", "ngram"])
def test_speculation_gives_the_tokens_of_plain_decoding(family, draft):
    model = model_of(family)
    parts = LanguageModel(model, stop_ids=STOPS)
    sampler = power_mh(proposal="matched")
    speculation = match().speculation(drafter(draft, parts, model))
    assert_near(drawn(parts, sampler, speculation=speculation), drawn(parts, sampler))


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_the_numbers_of_a_mixture_of_experts_do_not_depend_on_the_batch(family):
    parts = LanguageModel(model_of(family), stop_ids=STOPS)
    tolerance = 0.0 if rows_do_not_depend_on_the_batch() else TOLERANCE
    alone = drawn(parts, temperature(), slots=1, count=9)
    assert_near(drawn(parts, temperature(), slots=9, count=9), alone, tolerance)
    assert parts.config._experts_implementation != language_model.NAME, "the model is left as it was"
    assert parts.uncaptured == "the model is a mixture of experts"


def test_experts_of_another_form_get_a_line(capsys):
    class OtherExperts(torch.nn.Linear):
        """Experts that `transformers` cannot exchange."""

    model = random_model()
    with torch.random.fork_rng():
        model.model.layers[0].mlp.extra = OtherExperts(2, 2)
    LanguageModel(model)
    assert "the last bits of a record depend on the other samples" in capsys.readouterr().err


def test_wrong_layer_types_are_refused():
    """The mask of Mistral is one for all layers, whatever a configuration says."""
    model = random_model("llama")
    model.config.layer_types, model.config.sliding_window = ["sliding_attention", "full_attention", "full_attention"], WINDOW
    with pytest.raises(UserError, match="LlamaForCausalLM has other windows than its layer_types say"):
        LanguageModel(model)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama4"])
def test_forced_sequences_and_trees_have_the_masks_of_the_model(family, monkeypatch):
    """What probes read with: pieces of a sequence, and continuations that share a prefix."""
    monkeypatch.setattr(sequences, "_CHUNK", 9)
    monkeypatch.setattr(sequences, "_CHUNK_OF_SCORES", 9)
    parts, tokens = LanguageModel(model_of(family)), torch.from_numpy(PROMPTS[1])
    continuations = np.array([[5, 9, 11, 2], [5, 9, 40, 1], [17, 0, 3, 8]])

    def hidden(*pieces: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return parts.decoder(input_ids=torch.cat(pieces)[None], use_cache=False).last_hidden_state[0]

    reading = sequences.read(parts, tokens[None], keep_cache=True)
    torch.testing.assert_close(reading.hidden[0], hidden(tokens), atol=TOLERANCE, rtol=1e-3)
    with torch.no_grad():
        states, which = sequences.predictors(parts, reading.kept_cache(), reading.hidden[0, -1], len(tokens), continuations)
    expected = torch.stack([hidden(tokens, torch.from_numpy(row))[len(tokens) - 1 : -1] for row in continuations])
    torch.testing.assert_close(states[torch.from_numpy(which)], expected, atol=TOLERANCE, rtol=1e-3)


def test_reach():
    queries, keys = torch.tensor([[5, 9]]), torch.arange(10)
    causal = keys <= queries[..., None]
    for reach, seen in ((FULL, [range(6), range(10)]), (Reach(window=3), [range(3, 6), range(7, 10)]),
                        (Reach(chunk=4), [range(4, 6), range(8, 10)])):
        mask = reach.limit(causal, queries, keys)
        assert [row.nonzero()[:, 0].tolist() for row in mask[0]] == [list(each) for each in seen]


_UNSHARED = dict(num_kv_shared_layers=0, vocab_size_per_layer_input=61)
REFUSED = {
    "mamba": ("MambaForCausalLM", "MambaConfig", dict(state_size=4), r"linear_attention layers \(a recurrent state"),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", dict(attention_hidden_size=32), r"recurrent layers \(a recurrent state"),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", dict(layer_types=["conv", "full_attention"] * 2), r"conv layers \(a state"),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", dict(num_layers=4, attention_types=[[["global", "local"], 2]]),
                "local attention layers"),
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig", dict(**_BOTH, **_UNSHARED), "AltUp layers"),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", dict(**_BOTH, **_UNSHARED, global_head_dim=16),
               "layers whose keys differ in shape"),
    "embedding_gemma": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(**_BOTH, use_bidirectional_attention=True),
                        "bidirectional attention layers"),
    "granite": ("GraniteForCausalLM", "GraniteConfig", dict(logits_scaling=0.1), "more to its logits than a linear head"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_is_one_line_that_names_the_layers_and_vllm(family):
    name, config, changes, message = REFUSED[family]
    with torch.random.fork_rng():
        model = getattr(transformers, name)(getattr(transformers, config)(**{**_SHAPE, **changes})).eval()
    with pytest.raises(UserError, match=message) as caught:
        LanguageModel(model)
    assert str(caught.value).startswith(f"model.path: {name} ")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f", or engine=vllm, if vLLM has {name}, or engine=api with a server that has it")


def test_weights_that_are_not_numbers_are_called_so():
    spoilt = random_model("qwen3")
    with torch.no_grad():
        spoilt.model.layers[0].mlp.up_proj.weight[0] = torch.nan
    with pytest.raises(UserError, match="has logits that are not numbers; allowed: a checkpoint whose weights are numbers"):
        LanguageModel(spoilt)
