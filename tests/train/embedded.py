"""How the embedded target was made: `python -m tests.train.embedded` trains it again. A stopped training is resumed.

The target is a `Qwen3ForCausalLM` of eight layers with a byte-level tokenizer in which every digit is a token. It has the chat
template, the two stop ids and the unused vocabulary rows of Qwen3. Code that works on it therefore also works on Qwen3-4B.
The result is deterministic: the texts of step n are a function of the seed and n.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import MISSING
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_mcmc.components import has_spec, identity, runtime, spec_of
from dflash_mcmc.config import command
from dflash_mcmc.config.help import is_asked_for, usage_of
from dflash_mcmc.config.schema import Paths
from dflash_mcmc.dataset.arith import LEVELS, make_problem, make_solution
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process import program
from dflash_mcmc.rng import Key
from dflash_mcmc.store.files import make_folder, write_atomically
from dflash_mcmc.train import draft
from dflash_mcmc.train.loss import POOL_BATCHES, cut_by_length

_IGNORE = -100
_TOKENIZER_PAIRS = 10_000
_VALIDATION_SEED = 1
VOCAB_SIZE = 512
TOKENIZER_SIZE = 500
"""Upper bound on the ids that have a token. The rows above are padding and are never drawn, like Qwen3's from 151,669 on."""

_END_OF_TEXT, _TURN_START, _TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = (_END_OF_TEXT, _TURN_START, _TURN_END)
_THINK_TOKENS = ("<think>", "</think>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{%- endif -%}"
)


@dataclass(slots=True, kw_only=True)
class TrainingPlan:
    """A training of the embedded target: `conf/train.yaml`."""

    steps: int = identity(3600, "number of optimiser steps", ge=1)
    batch_size: int = identity(64, "solutions per batch", ge=1, le=1_000_000)
    learning_rate: float = identity(0.003, "learning rate of the constant part", gt=0)
    warmup_steps: int = identity(200, "number of steps of linear warm-up", ge=1)
    decay_fraction: float = identity(0.3, "fraction of the steps at the end in which the learning rate falls to zero", gt=0,
                                     lt=1)
    weight_decay: float = identity(0.1, "weight decay of AdamW", ge=0)
    seed: int = identity(0, "seed of the initial weights and texts")
    evaluate_every: int = runtime(300, "steps between evaluations and checkpoints", ge=1)
    problems_per_level: int = runtime(40, "validation problems per level", ge=1, le=1_000_000)
    num_threads: int | None = runtime(None, "number of CPU threads; null uses PyTorch's default", ge=1, le=4096)
    export: str | None = runtime(None, "folder for the checkpoint of the finished model; null uses the run folder")
    model: Any = MISSING
    paths: Paths = dataclasses.field(default_factory=Paths)

    def check(self, chosen_model: str) -> None:
        """Raises ConfigError for any model but the embedded one."""
        if chosen_model != "tiny":
            raise ConfigError("model", chosen_model, "'tiny', the embedded model")


def build_config() -> Qwen3Config:
    """1.65 M parameters in 8 layers of width 128."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, attention_dropout=0.0, use_cache=True,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model, float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(build_config())


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts; a digit never merges with anything, as in Qwen3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - len(_SPECIAL_TOKENS) - len(_THINK_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.add_tokens(list(_THINK_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_TURN_END, pad_token=_END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def stop_ids_of(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids of end of turn and end of text. Qwen3's generation_config names both, too."""
    return cast(list[int], tokenizer.convert_tokens_to_ids([_TURN_END, _END_OF_TEXT]))


def learning_rate(plan: TrainingPlan, step: int) -> float:
    """The rate of a step: warm-up, a constant rate, and a linear decay to zero over the last part of the run.

    Source: Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training durations".
    """
    decay_start = plan.steps * (1 - plan.decay_fraction)
    if step < plan.warmup_steps:
        return plan.learning_rate * (step + 1) / plan.warmup_steps
    if step < decay_start:
        return plan.learning_rate
    return plan.learning_rate * (plan.steps - step) / (plan.steps - decay_start)


def training_pairs(seed: int, start: int, stop: int) -> list[tuple[str, str]]:
    """The (question, solution) pairs `start` to `stop - 1` of the training split. The pairs cycle through the levels."""
    pairs = []
    for index in range(start, stop):
        key = Key(seed).fold_in("train", index)
        problem = make_problem(key, LEVELS[index % len(LEVELS)], "train")
        pairs.append((problem.question, make_solution(key, problem)))
    return pairs


def render_prompt(tokenizer, question: str) -> str:
    """The prompt for a question: the chat template without thinking, as runs use it."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


class Batches:
    """Batches by step: (tokens, labels), each int64 (batch_size, length). Only the solution and its stop id have labels."""

    def __init__(self, tokenizer, plan: TrainingPlan):
        self.tokenizer, self.plan = tokenizer, plan
        self._pool_index = -1
        self._pool: list[list[tuple[list[int], int]]] = []

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool_index, offset = divmod(step, POOL_BATCHES)
        if pool_index != self._pool_index:
            self._pool_index, self._pool = pool_index, self._make_pool(pool_index)
        rows = self._pool[offset]
        length = max(len(tokens) for tokens, _ in rows)
        tokens = torch.full((len(rows), length), self.tokenizer.pad_token_id)
        labels = torch.full((len(rows), length), _IGNORE)
        for row, (ids, prompt_length) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, prompt_length : len(ids)] = tokens[row, prompt_length : len(ids)]
        return tokens, labels

    def _make_pool(self, pool_index: int) -> list[list[tuple[list[int], int]]]:
        size = self.plan.batch_size * POOL_BATCHES
        pairs = training_pairs(self.plan.seed, pool_index * size, (pool_index + 1) * size)
        prompts = self.tokenizer([render_prompt(self.tokenizer, question) for question, _ in pairs])["input_ids"]
        answers = self.tokenizer([solution + self.tokenizer.eos_token for _, solution in pairs])["input_ids"]
        rows = [(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]
        key = Key(self.plan.seed).fold_in("order", pool_index)
        return cut_by_length(rows, [len(tokens) for tokens, _ in rows], self.plan.batch_size, key)


def loss_of(model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy per solution token, in nats."""
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    kept = targets != _IGNORE
    logits = model.lm_head(hidden[kept])
    return torch.nn.functional.cross_entropy(logits.float(), targets[kept])


def greedy_accuracy(model, tokenizer, stop_ids: list[int], seed: int, per_level: int) -> dict[int, float]:
    """Fraction of held-out problems with a correct greedy answer, by level. These problems are not in `dataset=arith`."""
    problems = [
        make_problem(Key(seed).fold_in("validation", index), level, "test")
        for level in LEVELS for index in range(per_level)
    ]
    tokenizer.padding_side = "left"
    inputs = tokenizer([render_prompt(tokenizer, p.question) for p in problems], return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=128,
            do_sample=False, eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id,
        )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = {level: 0 for level in LEVELS}
    for problem, text in zip(problems, texts, strict=True):
        right[problem.level] += f"\\boxed{{{problem.answer}}}" in text
    return {level: count / per_level for level, count in right.items()}


def train(plan: TrainingPlan) -> Path:
    """Trains to the end of the plan, from the last checkpoint if there is one. Returns the folder of the model."""
    if plan.num_threads:
        torch.set_num_threads(plan.num_threads)
    pairs = training_pairs(plan.seed, 0, _TOKENIZER_PAIRS)
    tokenizer = build_tokenizer(text for pair in pairs for text in pair)
    folder = run_folder(plan, tokenizer)
    make_folder(folder, "paths.outputs")
    model = build_model(plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True)
    batches, stop_ids = Batches(tokenizer, plan), stop_ids_of(tokenizer)

    def evaluate() -> dict[str, object]:
        return {"greedy_accuracy": greedy_accuracy(model, tokenizer, stop_ids, _VALIDATION_SEED, plan.problems_per_level)}

    draft.run(draft.TrainingLoop(
        name="train tiny", folder=folder, steps=plan.steps, evaluate_every=plan.evaluate_every,
        rate=lambda step: learning_rate(plan, step), gradients=lambda step: _gradients(model, *batches(step)),
        evaluate=evaluate, describe=_describe,
    ), model, optimizer)
    target = Path(plan.export) if plan.export else folder / "model"
    export(model, tokenizer, stop_ids, target)
    return target


def run_folder(plan: TrainingPlan, tokenizer) -> Path:
    """`outputs/train/tiny-<hash>`. The hash covers all inputs to the weights: plan, architecture, tokenizer and texts."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if has_spec(f) and spec_of(f).role == "identity"}
    recipe = (fields, build_config().to_dict(), tokenizer.backend_tokenizer.to_str(), training_pairs(plan.seed, 0, 1000))
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return Path(plan.paths.outputs) / "train" / f"tiny-{digest}"


def export(model, tokenizer, stop_ids: list[int], folder: Path) -> None:
    """Writes a checkpoint for `model.path=`. The weights are rounded to bfloat16 to halve the file, but loaded as float32."""
    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.generation_config.eos_token_id = stop_ids
    stored.generation_config.pad_token_id = tokenizer.pad_token_id
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_atomically(folder / "config.json", json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def _gradients(model, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, tokens, labels)
    loss.backward()
    return loss.item()


def _describe(figures: dict[str, object]) -> str:
    shares = cast("dict[int, float]", figures["greedy_accuracy"])
    return "greedy accuracy by level " + " ".join(f"{100 * share:.0f} %" for share in shares.values())


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if is_asked_for(arguments):
        print(usage_of(str(__doc__), {"Fields": TrainingPlan}))
        return
    plan, choices = command.compose_once("train", arguments, TrainingPlan)
    plan.check(choices["model"])
    print(f"model written to {train(plan)}")


if __name__ == "__main__":
    main()
