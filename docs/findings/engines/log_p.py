"""The log probabilities that a server returns against those of the checkpoint: a second look at `log p` in an audit.

    python log_p.py URL MODEL PROMPTS.json [TEMPERATURE]     # URL/completions; 0 without TEMPERATURE

Prints, for six prompts, the largest difference in nats of the first token and of the tokens after it, and how many of these
the server gives a probability of 1.
"""

import json
import sys
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    url, folder, questions, *warm = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for seed, prompt in enumerate(json.loads(Path(questions).read_text())[:6]):
        body = {"prompt": prompt, "max_tokens": 24, "temperature": float(warm[0]) if warm else 0.0, "top_p": 1.0, "top_k": 0,
                "min_p": 0.0, "seed": seed, "logprobs": 1}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            entries = json.load(answer)["choices"][0]["logprobs"]["content"]
        ids, stated = [each["id"] for each in entries], [each["logprob"] for each in entries]
        with torch.no_grad():
            log_p = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        off = [abs(one - other) for one, other in zip(stated, log_p[torch.arange(len(ids)), ids].tolist(), strict=True)]
        print(f"prompt {seed}: first token off by {off[0]:.3f} nats, the {len(off) - 1} after it by at most "
              f"{max(off[1:]):.2f}; {sum(each == 0.0 for each in stated[1:])} of them have probability 1")
