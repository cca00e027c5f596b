"""200 greedy tokens of guided targets on the fetched models, against plain loops on transformers in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from dflash_mcmc.blend.dola import DolaBlend
from dflash_mcmc.blend.model import ModelBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.rng import Key
from tests.engine.batching.test_batched import SAMPLERS
from tests.processes import ROOT

pytestmark = pytest.mark.slow
LENGTH = 200


def fetched(name: str):
    folder = ROOT / "outputs/models" / name
    if not folder.is_dir():
        pytest.skip(f"needs {folder} (python -m dflash_mcmc.fetch {name})")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompt_of(model, question: str) -> np.ndarray:
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    turns = [{"role": "user", "content": question}]
    return np.array(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


class Reader:
    """A model that reads one more token at a time: the last logits, and the states of all layers."""

    def __init__(self, model) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)

    def read(self, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        output = self.model(torch.tensor([tokens]), past_key_values=self.cache, output_hidden_states=True)
        return log_law(output.logits[0, -1]), [state[0, -1] for state in output.hidden_states[1:]]


def log_law(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), dim=-1)


def greedy_tokens(prompt: np.ndarray, alpha_mask: float, scores) -> tuple[list[int], int]:
    """The tokens of largest score among the plausible ones, and how many are not the model's own choice."""
    tokens, new, changed = [], prompt.tolist(), 0
    for _ in range(LENGTH):
        own, score = scores(new)
        new = [int(score.masked_fill(own < own.max() + math.log(alpha_mask), -torch.inf).argmax())]
        changed += new[0] != int(own.argmax())
        tokens += new
    return tokens, changed


def engine_tokens(model, prompt: np.ndarray, blend, **companion) -> list[int]:
    engine = BatchedEngine(LanguageModel(model).without_stops(), blend, 1, len(prompt) + LENGTH, **companion)
    done, = engine.run([(0, SAMPLERS["greedy"].chain(prompt, LENGTH, Key(0)))])
    return done.result.trajectory.tokens.tolist()


@torch.inference_mode()
def test_contrastive_decoding():
    """O'Brien and Lewis 2023 (2309.09117): strength 0.5, mask 0.1; the 1.5B against the 0.5B."""
    expert, amateur = fetched("qwen2_5_coder_1_5b"), fetched("qwen2_5_coder_0_5b")
    prompt = prompt_of(expert, "Natalia sold clips to 48 friends in April, and to half as many in May. How many in all?")
    first, second = Reader(expert), Reader(amateur)

    def scores(new: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own, other = first.read(new)[0], second.read(new)[0]
        return own, 1.5 * own - 0.5 * other

    expected, changed = greedy_tokens(prompt, 0.1, scores)
    found = engine_tokens(expert, prompt, ModelBlend(beta=-0.5, model="x", alpha_mask=0.1), companion=LanguageModel(amateur))
    assert found == expected
    assert changed > 0


@torch.inference_mode()
def test_dola():
    """Chuang et al. 2023 (2309.03883), with beta -2 and layers of the lower half as candidates, on text of many choices."""
    model = fetched("qwen2_5_coder_0_5b")
    prompt = prompt_of(model, "Tell a story about a fox who learns to sail.")
    reader, layers, taken = Reader(model), DolaBlend().tapped_layers(model.config.num_hidden_layers), set()

    def scores(new: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own, states = reader.read(new)
        others = [log_law(model.lm_head(states[layer])) for layer in layers]
        means = [torch.logaddexp(own, other) - math.log(2) for other in others]
        apart = [sum(float((law.exp() * (law - mean)).sum()) for law in (own, other)) / 2
                 for other, mean in zip(others, means, strict=True)]
        taken.add(int(np.argmax(apart)))
        return own, 3.0 * own - 2.0 * others[int(np.argmax(apart))]

    expected, changed = greedy_tokens(prompt, 0.1, scores)
    found = engine_tokens(model, prompt, DolaBlend(beta=-2.0, alpha_mask=0.1))
    assert found == expected
    assert changed > 0
    assert len(taken) > 1
