"""Power sampling as in the published code: one chain, and one call of `transformers.generate` per proposal.

The loop follows `power_samp_utils.py` of arXiv 2510.14901, but has this package's exact acceptance rule. The loop and the
engine therefore run the same algorithm. But the loop completes every proposal, and every call reads the prompt and the prefix
again, because nothing is kept between calls.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig

from dflash_mcmc.ops import Draw, Operation, drive
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.types import Trajectory
from tests.bench.subject import Subject


class Spent(NamedTuple):
    """The cost of one chain."""

    seconds: float
    token_forwards: int
    tokens_drawn: int
    accepted: int
    proposals: int


def chain(subject: Subject, sampler: PowerMH, prompt: np.ndarray, key: Key) -> Spent:
    """Runs one chain of `sampler` with `generate`. The key seeds PyTorch's random generator."""
    torch.manual_seed(key.integer(2**31))
    started, loop = time.perf_counter(), _PublishedLoop(subject, sampler)
    result = drive(sampler.chain(prompt, subject.horizon, key), loop.answer)
    return Spent(time.perf_counter() - started, loop.token_forwards, loop.tokens_drawn, result.accepted, result.proposals)


class _PublishedLoop:
    def __init__(self, subject: Subject, sampler: PowerMH):
        self._subject, self._temperature = subject, sampler.law().temperature
        self.token_forwards = self.tokens_drawn = 0

    @torch.inference_mode()
    def answer(self, operation: Operation) -> Trajectory:
        """Extends a trajectory by one call of `generate`, whose outputs give the log-probabilities of the tokens."""
        if not isinstance(operation, Draw):
            raise TypeError("the published loop carries out only Draw: the sampler's `rescore` must be false")
        path, horizon = operation.trajectory, operation.horizon
        if path.complete(horizon):
            return path
        given = torch.from_numpy(np.concatenate([path.prompt, path.tokens]))[None]
        stops = list(self._subject.model.stop_ids)
        settings = GenerationConfig(max_new_tokens=horizon - path.length, do_sample=True, temperature=self._temperature,
                                    top_k=0, top_p=1.0, return_dict_in_generate=True, output_logits=True, output_scores=True,
                                    eos_token_id=stops, pad_token_id=stops[0])
        output = self._subject.causal_lm.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
        tokens = output.sequences[0, given.shape[1] :]
        log_p, log_q = (torch.stack([torch.log_softmax(step[0].float(), dim=-1)[token]
                                     for step, token in zip(steps, tokens, strict=True)]).double().numpy()
                        for steps in (output.logits, output.scores))
        self.token_forwards += given.shape[1] + len(tokens) - 1
        self.tokens_drawn += len(tokens)
        return path.extended(tokens.numpy(), log_p, log_q, np.zeros((len(tokens), 2)), int(tokens[-1]) in stops)
