"""How often whole audits of right engines are red: `python -m tests.verify.false_alarms 1000`.

`python -m tests.verify.false_alarms 500 500` runs the second half alone. An audit draws 24 answers of at most 32 tokens to
problems of its own with a seed of its own, half of them to one prompt, so that what earlier answers show is bet on too. It
states the law that they were drawn from. Laws take turns: temperature 1, top-p at another temperature, a penalty, and
speculation of the embedded pair. One line each: the law, tokens, and log10 of the largest evidence. An audit is red at
level a if its evidence has ever reached 1 / a, so that one run answers for every level.
"""

from __future__ import annotations

import sys

import numpy as np
from transformers import AutoTokenizer

import dflash_mcmc as dm
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.verify.audit import audit
from dflash_mcmc.verify.drawn import DrawnText

LAWS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "frequency_penalty": 1.0},
        {"temperature": 1.5})
LEVELS = (0.2, 0.1, 0.05, 0.01, 0.001)


def main(audits: int, first: int) -> None:
    """Prints a line for each audit, and the shares of red ones."""
    tiny, draft, largest = dm.component("model", "tiny"), dm.component("draft", "tiny"), []
    target = tiny.load("cpu")
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    asked_of = [[{"role": "user", "content": problem.question}] for problem in dm.component("dataset", "arith").problems()]
    texts = [tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for turns in asked_of]
    prompts = [np.array(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    for number in range(first, first + audits):
        rng = np.random.default_rng(number)
        law = LAWS[number % len(LAWS)]
        speculates = law["temperature"] == 1.5
        chosen = [prompts[place] for place in rng.choice(len(prompts), 13, replace=False)]
        asked = [chosen[0]] * 12 + chosen[1:]
        drawn = dm.sample(tiny, None, asked, draft=draft if speculates else None, sampler=dm.Temperature(**law), seed=number,
                          decoder="speculative_rejection" if speculates else "plain", max_new_tokens=32, progress=False)
        pairs = [(asked[one.prompt], np.array(one.tokens)) for one in drawn if one.tokens]
        found = audit(target, (DrawnText("", *pair) for pair in pairs), SamplingParams(**law), 1e-3)
        assert len(found.outside) == found.near_ties, found.outside
        largest.append(found.together.largest)
        print(number, law, found.tokens, f"{largest[-1]:.3f}", flush=True)
    for level in LEVELS:
        red = int((np.array(largest) >= -np.log10(level)).sum())
        print(f"level {level:g}: {red} of {audits} red ({100 * red / audits:.1f} %)")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
