"""Laws of a token that the fields of sampler=temperature cannot state: each draws, and each can be audited.

    python -m dflash_mcmc sampler=temperature sampler.function=docs/examples/laws.py:xtc
    python -m dflash_mcmc.verify texts.jsonl model=tiny sampler.function=docs/examples/laws.py:xtc

A law takes the target's float32 logits (vocabulary,), which it may change, and the ids before the token. It returns log
weights, with -inf for what cannot be drawn. It has no state, since it is called again for the same token.
"""

import math

import torch


def xtc(logits, text, threshold=0.1, probability=0.5):
    """Exclude top choices: with a probability, all tokens above a threshold but the least likely of them. A law with a random
    choice is the mixture of its two outcomes."""
    p = logits.double().softmax(dim=-1)
    above = p >= threshold
    if above.sum() < 2:
        return p.log()
    above[torch.where(above, p, 2.0).argmin()] = False
    cut = torch.where(above, 0.0, p)
    return ((1 - probability) * p + probability * cut / cut.sum()).log()


def dry(logits, text, multiplier=0.8, base=1.75, allowed_length=2):
    """Don't repeat yourself: a token that would go on a repeated sequence of n tokens loses multiplier * base^(n - allowed)
    nats."""
    longest = {}
    for end in range(1, len(text)):
        n = 0
        while n < end and text[end - 1 - n] == text[-1 - n]:
            n += 1
        longest[int(text[end])] = max(n, longest.get(int(text[end]), 0))
    for token, n in longest.items():
        if n >= allowed_length:
            logits[token] -= multiplier * base ** (n - allowed_length)
    return logits


def min_k(logits, text):
    """Min-k (arXiv 2604.11012, as in vLLM's pull request 48142): the most likely tokens up to the largest drop between
    neighbours, as a share of the range of logits, over its rank. The temperature changes no kept set."""
    values, order = logits.sort(descending=True)
    drops = (values[:-1] - values[1:]) / torch.arange(1, len(values))
    logits[order[int(drops.argmax()) + 1 :]] = -math.inf
    return logits


def bias(logits, text, token=11, nats=2.0):
    """A bias of one token, as `logit_bias` of the OpenAI API."""
    logits[token] += nats
    return logits


def grammar(logits, text, allowed=(11, 12, 13)):
    """The mask of a grammar. This one has one rule: every token is one of these."""
    mask = torch.full_like(logits, -math.inf)
    mask[list(allowed)] = 0.0
    return logits + mask
