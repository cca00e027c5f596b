"""What the sources of guided targets add on worked solutions: `python -m tests.bench.sources TARGET OTHER DATA [PROBLEMS]`.

The target reads the reference programs of HumanEval (DATA is its JSON Lines file) after its chat prompt, and so do the
sources: the OTHER model, the target after the prompt's last token, its raw layer -3, and that layer turned as in blend=noise.
A row gives the mean log p a token of the solutions under (1 - beta) * final + beta * other, relative to beta 0, by beta; and
KL(final | other). One forward of each model a problem suffices, because the tokens are given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tabulate import tabulate
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_mcmc.blend.layer import LayerBlend

BETAS = (-1.0, -0.5, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.5)
_ASK = ("Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        "```python\n{}\n```")


@torch.inference_mode()
def main(target: str, other: str, data: str, problems: int = 5) -> str:
    """The table."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (target, other)]
    noise, sums, count = LayerBlend(beta=1.0, direction="random"), dict[str, torch.Tensor](), 0
    for line in Path(data).read_text(encoding="utf-8").splitlines()[:problems]:
        row = json.loads(line)
        turns = [{"role": "user", "content": _ASK.format(row["prompt"])}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        first = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(f"```python\n{row['prompt']}{row['canonical_solution']}```", add_special_tokens=False)["input_ids"]
        output = models[0](input_ids=torch.tensor([first + answer]), output_hidden_states=True)
        keep = slice(len(first) - 1, len(first) + len(answer) - 1)
        head, layer = models[0].get_output_embeddings(), output.hidden_states[-3][0, keep]  # entry l + 1 is layer l
        final = output.logits[0, keep].float()
        parts = {"model": models[1](input_ids=torch.tensor([first + answer])).logits[0, keep].float(),
                 "prompt": models[0](input_ids=torch.tensor([first[-1:] + answer])).logits[0, : len(answer)].float(),
                 "layer": head(layer).float(), "noise": head(noise.auxiliary([layer], lambda state: state)).float()}
        chosen = torch.tensor(answer)[:, None]
        for name, logits in parts.items():
            sums[name] = sums.get(name, torch.zeros(len(BETAS) + 1)) + _row(final, logits[:, : final.shape[1]], chosen)
        count += len(answer)
        print(f"{row['task_id']}: {len(answer)} tokens", file=sys.stderr, flush=True)
    rows = [[name, *(f"{float(value / count):+.4f}" for value in found)] for name, found in sums.items()]
    return tabulate(rows, ["source", *map(str, BETAS), "KL"]) + f"\n{count} tokens of {problems} solutions"


def _row(final: torch.Tensor, other: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The gains of log p at each beta, and KL(final | other), summed over tokens."""
    def log_p(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1)

    base = log_p(final).gather(1, chosen).sum()
    gains = [log_p((1 - beta) * final + beta * other).gather(1, chosen).sum() - base for beta in BETAS]
    return torch.stack([*gains, (log_p(final).exp() * (log_p(final) - log_p(other))).sum()])


if __name__ == "__main__":
    print(main(*sys.argv[1:4], *map(int, sys.argv[4:])))
