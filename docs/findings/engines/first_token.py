"""The first token of many requests to a server against the law of the checkpoint: a second look at a red audit.

    python first_token.py URL MODEL PROMPTS.json [FIELD=VALUE]...     # URL/completions; FIELD of the request

Prints, for each prompt, the probability that the checkpoint gives at temperature 1 to tokens that the server has never drawn.
"""

import json
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

NUM_DRAWS = 400


def drawn(url: str, prompt: list[int], seed: int, fields: dict[str, Any]) -> int:
    """The id of one first token, as the server lists it with its log probability."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "seed": seed, "logprobs": 1, **fields}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return int(json.load(answer)["choices"][0]["logprobs"]["content"][0]["id"])


if __name__ == "__main__":
    server, folder, file, *given = sys.argv[1:]
    more = {name: json.loads(value) for name, value in (each.split("=", 1) for each in given)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids in json.loads(Path(file).read_text())[:2]:
        with torch.no_grad():
            law = torch.softmax(model(torch.tensor([ids])).logits[0, -1].double(), 0)
        with ThreadPoolExecutor(4) as pool:
            counts = Counter(pool.map(lambda seed, prompt=ids: drawn(server, prompt, seed, more), range(NUM_DRAWS)))
        never = sum(value for token, value in enumerate(law.tolist()) if token not in counts)
        best, least = int(law.argmax()), min(float(law[token]) for token in counts)
        print(f"{len(counts)} different tokens in {NUM_DRAWS} draws; the least likely one has {least:.4f}, "
              f"{least / law[best]:.3f} of the largest; those never drawn have {never:.4f} together; the most likely one has "
              f"{law[best]:.3f} and came {counts[best] / NUM_DRAWS:.3f} of the time", flush=True)
