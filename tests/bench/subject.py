"""The subjects of a benchmark: models with prompts.

`tiny` is the embedded model, `mid` has 107 million random weights, and `smollm2` is the pretrained model of `make smollm2`.
"""

import copy
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dflash_mcmc.api.choices import component
from dflash_mcmc.config import command
from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset.inputs import conversations
from dflash_mcmc.draft.dflash import DFlashDraft
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.model.hf import HFModel
from dflash_mcmc.rng import Key, Stream

_HIDDEN_SIZE, _VOCAB_SIZE = 768, 16384
_LAYER_GAIN, _LOGIT_SCALE = 3.0, 8.0
"""With these values the entropy of a token is 0.5 nats and power sampling accepts half of its proposals, as in real models."""
_NUM_STOPS, _SHORTEST, _LONGEST, _NUM_PROMPTS = 64, 20, 60, 512


class Subject(NamedTuple):
    """A model, its prompts, and a draft."""

    name: str
    causal_lm: Any
    """The transformers model itself, for its `generate`. The type is Any, because the annotations of `generate` reject it."""
    model: LanguageModel
    prompts: list[np.ndarray]
    horizon: int
    """Maximal number of new tokens."""
    draft: DFlashDraft | None = None
    """Draft for this model; None if it has none."""


def with_problems(name: str, config: Config, draft: DFlashDraft | None) -> Subject:
    """A model of the configuration with its problems, as `python -m dflash_mcmc` uses them."""
    import transformers

    model, source = config.model.load("cpu"), cast(HFModel, config.model)
    causal_lm = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=model.dtype).eval()
    return Subject(name, causal_lm, model, prompts_of(config, model), config.dataset.max_new_tokens, draft)


def prompts_of(config: Config, model: LanguageModel) -> list[np.ndarray]:
    """The token ids of the configuration's problems."""
    template = conversations.resolve(config.dataset.prompt)
    texts = [template.replace("{question}", problem.question) for problem in config.dataset.problems()]
    return [model.encode(config.model.prompt(model.tokenizer, text), not config.model.chat) for text in texts]


def mid(horizon: int) -> Subject:
    """A random Qwen3 of 107 M parameters, whose logits are scaled for realistic acceptance."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        causal_lm = Qwen3ForCausalLM(Qwen3Config(
            hidden_size=_HIDDEN_SIZE, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, head_dim=64, vocab_size=_VOCAB_SIZE, max_position_embeddings=2048,
            tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=None)).eval()
        with torch.no_grad():
            for name, parameter in causal_lm.named_parameters():
                if ".layers." in name and parameter.dim() == 2:
                    parameter.mul_(_LAYER_GAIN)
            causal_lm.lm_head.weight.normal_(0.0, _LOGIT_SCALE / _HIDDEN_SIZE**0.5)
    model = LanguageModel(copy.deepcopy(causal_lm), stop_ids=range(_NUM_STOPS), packs=True)  # `generate` keeps its own
    return Subject("mid", causal_lm, model, random_prompts(_VOCAB_SIZE), horizon)


def random_prompts(vocab_size: int) -> list[np.ndarray]:
    """Prompts of random tokens, without the smallest ids, which are stop ids."""
    stream = Stream(Key(0).fold_in("bench", "prompts"))
    lengths = [stream.integer(_SHORTEST, _LONGEST) for _ in range(_NUM_PROMPTS)]
    return [np.array([stream.integer(_NUM_STOPS, vocab_size - 1) for _ in range(length)]) for length in lengths]


REAL = {"smollm2": "float32", "smollm2_bfloat16": "bfloat16"}
"""The subjects with the pretrained model, and their precision."""


def subject_of(name: str, mid_horizon: int, draft: str | None = "", outputs: str = "outputs") -> Subject:
    """A subject by its name. Raises UserError if its checkpoint is missing.

    Args:
        draft: the folder of the draft of `tiny` or `smollm2`; it may be empty or None if no draft is used.
        outputs: the folder with the models that were fetched.
    """
    if name in REAL:
        config, _ = command.compose_once("config", [
            "experiment=smollm2", "dataset.limit=null", f"dataset.max_new_tokens={mid_horizon}",
            f"model.dtype={REAL[name]}", f"paths.outputs={outputs}"], Config)
        config.model.check(config)
        return with_problems(name, config, _dflash(draft, REAL[name]) if draft else None)
    config, _ = command.compose_once("config", ["tracker=none"], Config)
    if name == "mid":
        return mid(mid_horizon)
    return with_problems("tiny", config, _dflash(draft or "", "float32"))


def _dflash(folder: str, dtype: str) -> DFlashDraft:
    return cast(DFlashDraft, component("draft", "dflash", path=folder, dtype=dtype))
