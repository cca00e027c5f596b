"""Token-by-token sampling at a temperature, with the usual truncations."""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_mcmc.components import Need, Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import LARGEST, PENALTY, SMALLEST, Chain, Draw, LawFunction, SamplingParams
from dflash_mcmc.process.functions import fingerprint, function_at
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import AtTemperature, Truncated
from dflash_mcmc.types import ChainResult, ExpectedCost, Trajectory

_MOST_KEPT = 512
"""Largest `top_k` whose kept sets are recorded."""


@functools.lru_cache(maxsize=8)
def _loaded(path: str, content: str) -> LawFunction:
    """The function of a file with this content. Draws of one function share a step, so that it is loaded once."""
    return function_at("sampler.function", path)


@register("sampler", "temperature")
@dataclass(slots=True, kw_only=True)
class Temperature(Truncated, AtTemperature):
    """Each token from softmax(logits / temperature), with penalties, truncated by top-n-sigma, top-k, typical, top-p, min-p.

    Law: prod_t q(x_t | x_<t), where q is the law that `SamplingParams` describes. At temperature 1/alpha every token's
    conditional is sharpened by alpha. This is not the power distribution p^alpha of whole sequences. The repetition penalty
    counts the tokens of prompt and answer (Keskar et al. 2019). Frequency and presence penalty count the tokens of the
    answer alone, as defined by the OpenAI API and vLLM: logits - frequency * count - presence * (count > 0).

    With `function` q is what a function of the user makes of the target's logits and the tokens before: XTC, DRY, a bias, the
    mask of a grammar. It runs on the host, row by row, after each step.
    """

    draws_once = True
    needs = (Need("engine.calls_functions", given="function"),
             Need("decoder.is_null", given="function", why=", which reads each token"))

    alpha: float = identity(4.0, "temperature is 1/alpha unless given: the token-level counterpart of p^alpha", ge=SMALLEST,
                            le=LARGEST)
    min_p: float = identity(0.0, "draws keep tokens with at least this share of the top probability; 0 keeps all", ge=0, le=1)
    repetition_penalty: float = identity(1.0, "draws divide the logits of tokens already present by this; 1 is off, as it "
                                         "always is in the target", ge=SMALLEST, le=LARGEST)
    frequency_penalty: float = identity(0.0, "draws subtract this from a token's logit for each time that it is in the answer "
                                        "so far; 0 is off, as it always is in the target", ge=-PENALTY, le=PENALTY)
    presence_penalty: float = identity(0.0, "draws subtract this from the logits of tokens that are in the answer so far; 0 "
                                       "is off, as it always is in the target", ge=-PENALTY, le=PENALTY)
    penalty_counts: Literal["answer", "prompt+answer"] = identity(
        "answer", "tokens that frequency and presence penalty count: answer = as the OpenAI API and vLLM; prompt+answer = "
        "those of the prompt too")
    top_n_sigma: float = identity(0.0, "draws keep tokens whose logit is at most this many standard deviations below the "
                                  "largest; 0 keeps all", ge=0, later=True)
    typical_p: float = identity(1.0, "draws keep the smallest set with at least this mass of the tokens whose surprisal is "
                                "nearest to the entropy; 1 keeps all", gt=0, le=1, later=True)
    order: Literal["temperature_first", "temperature_last"] = identity(
        "temperature_first", "whether the kept tokens are chosen after the temperature, as in transformers and vLLM, or "
        "before it, as in llama.cpp and mlx-lm", later=True)
    function: str | None = identity(None, "FILE:FUNCTION, any other law of a token, from float32 logits and the ids before it "
                                    "to log weights; the identity has the function's name and the file's content", later=True)
    sampling_mask: bool = runtime(False, "record the tokens that top_k, top_p and min_p keep at each token, and their log q; "
                                  f"needs a top_k up to {_MOST_KEPT}, and top_k * 16 bytes of memory for each token of a slot")

    def check(self, config: Settings) -> None:
        """Raises ConfigError if kept sets are asked for and could be large, and for a function beside what it replaces."""
        if self.sampling_mask and not 0 < self.top_k <= _MOST_KEPT:
            raise ConfigError("sampler.sampling_mask", True, f"false with sampler.top_k={self.top_k}; or sampler.top_k from 1 "
                              f"to {_MOST_KEPT}, which bounds the sets")
        if self.function is None:
            return
        if self.temperature is not None or self._fields() != SamplingParams(1.0 / self.alpha):
            raise ConfigError("sampler.function", self.function, "without a temperature, truncation or penalty: it is the "
                              "whole law")
        self.law()

    def law(self) -> SamplingParams:
        if self.function is not None:
            return SamplingParams(function=_loaded(self.function, fingerprint("sampler.function", self.function)))
        return self._fields()

    def _fields(self) -> SamplingParams:
        return super().law()._replace(
            min_p=self.min_p, top_n_sigma=self.top_n_sigma, typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty, frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty, temperature_last=self.order == "temperature_last",
            counts_prompt=self.penalty_counts == "prompt+answer" and bool(self.frequency_penalty or self.presence_penalty))

    def fingerprint(self) -> str | None:
        return None if self.function is None else fingerprint("sampler.function", self.function)

    def reads_rows(self) -> bool:
        """Kept sets are read from whole rows."""
        return self.sampling_mask

    def canonical(self, config: Settings) -> dict[str, object]:
        """The law depends on the temperature, given directly or by alpha, or on a function, known by its name.

        What penalties count is left out where none counts.
        """
        values = {**super().canonical(config), "alpha": None}
        if not self.law().counts_tokens:
            values["penalty_counts"] = "answer"
        return values if self.function is None else {
            **values, "function": self.function.rpartition(":")[2], "temperature": None}

    def remarks(self) -> list[str]:
        """That alpha is a temperature here."""
        return [] if self.temperature is not None or self.function is not None else [
            f"sampler.alpha={self.alpha:g} of sampler=temperature: each token is drawn at temperature {1 / self.alpha:.3g}"]

    def power(self) -> float | None:
        """1 if tokens are drawn from the target itself."""
        return 1.0 if self.law() == SamplingParams() else None

    def expected_cost(self, length: float, horizon: int) -> ExpectedCost:
        return ExpectedCost(length)

    def chain(self, prompt: np.ndarray, horizon: int, key: Key) -> Chain:
        path = yield Draw(Trajectory.start(prompt), horizon, self.law(), key.fold_in("token"), kept=self.sampling_mask)
        return ChainResult(path)
