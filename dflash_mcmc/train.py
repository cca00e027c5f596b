"""Trains the embedded target: `python -m dflash_mcmc.train model=tiny`. Deterministic; resumes where it was stopped.

The texts of step n are a function of (seed, n), and a checkpoint holds the optimiser's state, so that a run stopped
anywhere and started again ends in the same weights. The learning rate is constant after a warm-up and falls linearly to
zero over the last part of the run (Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed
training durations").
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from dflash_mcmc import cli
from dflash_mcmc.config import Paths
from dflash_mcmc.dataset.arith import LEVELS, make_problem, make_solution
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime, spec_of
from dflash_mcmc.rng import Key
from dflash_mcmc.store import write_atomically

if TYPE_CHECKING:
    import torch

_IGNORE = -100
_POOL_BATCHES = 8
"""Batches are cut from a pool of so many, sorted by length, so that little of a batch is padding."""
_TOKENIZER_PAIRS = 10_000
_VALIDATION_SEED = 1


@dataclass(slots=True, kw_only=True)
class Plan:
    """A training run: `conf/train.yaml`."""

    steps: int = identity("optimiser steps", ge=1)
    batch_size: int = identity("solutions in a batch", ge=1)
    learning_rate: float = identity("of the constant part", gt=0)
    warmup_steps: int = identity("steps of linear warm-up", ge=1)
    decay_fraction: float = identity("last part of the run, in which the rate falls to zero", gt=0, lt=1)
    weight_decay: float = identity("of AdamW", ge=0)
    seed: int = identity("of initial weights and texts")
    evaluate_every: int = runtime("steps between evaluations and checkpoints", ge=1)
    problems_per_level: int = runtime("validation problems of each level", ge=1)
    num_threads: int | None = runtime("threads of the CPU's arithmetic; null takes what PyTorch finds", ge=1)
    export: str | None = runtime("folder to write the finished model to, as a checkpoint; null takes the run folder")
    model: Any = MISSING
    paths: Paths = dataclasses.field(default_factory=Paths)

    def check(self, chosen_model: str) -> None:
        """Only the embedded model can be trained. Raises ConfigError."""
        if chosen_model != "tiny":
            raise ConfigError("model", chosen_model, "'tiny'; other models are loaded, not trained")


def learning_rate(plan: Plan, step: int) -> float:
    """Warm-up, constant, linear decay to zero."""
    decay_start = plan.steps * (1 - plan.decay_fraction)
    if step < plan.warmup_steps:
        return plan.learning_rate * (step + 1) / plan.warmup_steps
    if step < decay_start:
        return plan.learning_rate
    return plan.learning_rate * (plan.steps - step) / (plan.steps - decay_start)


def training_pairs(seed: int, start: int, stop: int) -> list[tuple[str, str]]:
    """(question, solution) number `start` to `stop - 1` of the training split; levels in turn."""
    pairs = []
    for index in range(start, stop):
        key = Key(seed).fold_in("train", index)
        problem = make_problem(key, LEVELS[index % len(LEVELS)], "train")
        pairs.append((problem.question, make_solution(key, problem)))
    return pairs


def render_prompt(tokenizer, question: str) -> str:
    """The question in the chat template, thinking off: what the target will be asked with."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


class Batches:
    """Batch n of the run: (tokens, labels), each (batch_size, length) int64; labels cover the solution and its end."""

    def __init__(self, tokenizer, plan: Plan):
        self.tokenizer, self.plan = tokenizer, plan
        self._pool_index, self._pool = -1, []

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        pool_index, offset = divmod(step, _POOL_BATCHES)
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
        size = self.plan.batch_size * _POOL_BATCHES
        pairs = training_pairs(self.plan.seed, pool_index * size, (pool_index + 1) * size)
        prompts = self.tokenizer([render_prompt(self.tokenizer, question) for question, _ in pairs])["input_ids"]
        answers = self.tokenizer([solution + self.tokenizer.eos_token for _, solution in pairs])["input_ids"]
        rows = sorted(((p + a, len(p)) for p, a in zip(prompts, answers, strict=True)), key=lambda row: len(row[0]))
        batches = [rows[i : i + self.plan.batch_size] for i in range(0, size, self.plan.batch_size)]
        order = Key(self.plan.seed).fold_in("order", pool_index).uniforms(0, len(batches)).argsort()
        return [batches[i] for i in order]


def loss_of(model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy per solution token, in nats."""
    import torch

    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    kept = targets != _IGNORE
    logits = model.lm_head(hidden[kept])
    return torch.nn.functional.cross_entropy(logits.float(), targets[kept])


def greedy_accuracy(model, tokenizer, stop_ids: list[int], seed: int, per_level: int) -> dict[int, float]:
    """Share of held-out problems whose greedy answer is right, by level. These are not the problems of `dataset=arith`."""
    import torch

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


def train(plan: Plan) -> Path:
    """Trains to the end of the plan, from the last checkpoint where there is one. Returns the folder of the model."""
    import torch
    from tqdm import tqdm

    from dflash_mcmc.model import tiny

    if plan.num_threads:
        torch.set_num_threads(plan.num_threads)
    pairs = training_pairs(plan.seed, 0, _TOKENIZER_PAIRS)
    tokenizer = tiny.build_tokenizer(text for pair in pairs for text in pair)
    folder = run_folder(plan, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny.build_model(plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True)
    start = _restore(folder, model, optimizer)
    batches, stop_ids = Batches(tokenizer, plan), tiny.stop_ids(tokenizer)
    with tqdm(total=plan.steps, initial=start, unit="step", desc="train tiny", mininterval=0.5) as bar:
        for step in range(start, plan.steps):
            loss = _optimise(model, optimizer, batches(step), learning_rate(plan, step))
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
            if (step + 1) % plan.evaluate_every == 0 or step + 1 == plan.steps:
                accuracy = greedy_accuracy(model, tokenizer, stop_ids, _VALIDATION_SEED, plan.problems_per_level)
                _checkpoint(folder, model, optimizer, step + 1, loss, accuracy)
                bar.write(f"step {step + 1}: loss {loss:.3f}, greedy accuracy by level "
                          + " ".join(f"{100 * share:.0f} %" for share in accuracy.values()))
    target = Path(plan.export) if plan.export else folder / "model"
    export(model, tokenizer, stop_ids, target)
    return target


def run_folder(plan: Plan, tokenizer) -> Path:
    """`outputs/train/tiny-<hash of all that decides the weights>`: plan, architecture, tokenizer and texts."""
    from dflash_mcmc.model import tiny

    values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)
              if (spec := spec_of(f)) and spec.role == "identity"}
    recipe = (values, tiny.build_config().to_dict(), tokenizer.backend_tokenizer.to_str(), training_pairs(plan.seed, 0, 1000))
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return Path(plan.paths.outputs) / "train" / f"tiny-{digest}"


def export(model, tokenizer, stop_ids: list[int], folder: Path) -> None:
    """Writes a checkpoint that `model.path=` loads: weights rounded to bfloat16 to halve the file, to be run in float32."""
    import copy

    import torch

    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.generation_config.eos_token_id = stop_ids
    stored.generation_config.pad_token_id = tokenizer.pad_token_id
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_atomically(folder / "config.json", json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def _optimise(model, optimizer, batch: tuple[torch.Tensor, torch.Tensor], rate: float) -> float:
    import torch

    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, *batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _restore(folder: Path, model, optimizer) -> int:
    """The step to go on with; 0 without a checkpoint."""
    import torch

    if not (folder / "checkpoint.pt").is_file():
        return 0
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _checkpoint(folder: Path, model, optimizer, step: int, loss: float, accuracy: dict[int, float]) -> None:
    import torch

    temporary = folder / ".checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
    os.replace(temporary, folder / "checkpoint.pt")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": loss, "greedy_accuracy": accuracy}) + "\n")


def main() -> None:
    """Trains what the command line says and exits."""
    from dflash_mcmc.__main__ import guarded

    sys.exit(guarded(_main))


def _main() -> None:
    plan, choices = cli.compose_once("train", sys.argv[1:], Plan)
    plan.check(choices["model"])
    print(f"model written to {train(plan)}")


if __name__ == "__main__":
    main()
