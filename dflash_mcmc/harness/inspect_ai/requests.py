"""A request of inspect_ai in this package's terms. inspect_ai is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_mcmc.dataset import stop_strings
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.store import records

_COMMON = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
_UNUSED = ("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections",
           "system_message", "cache", "max_tool_output", "reasoning_history", "cache_prompt", "internal_tools",
           "parallel_tool_calls", "fail_on_refusal", "fallback_models")
"""Fields that inspect_ai carries out itself, or that say nothing about an answer without tools."""
_NEUTRAL = {"best_of": 1, "top_logprobs": 0, "prompt_logprobs": 0, "logit_bias": {}, "modalities": ["text"], "batch": False}
"""Fields that are refused unless they have a value that changes nothing."""

STOP_REASONS = {records.STOP_ID: "stop", records.STOP_STRING: "stop", records.LENGTH: "max_tokens"}
"""inspect_ai's word for the reason of an end."""


class RequestSettings(NamedTuple):
    """How the answers to a request are drawn."""

    sampler: Mapping[str, Any]
    """Fields of the sampler, and `name` for another one: `extra_body={"sampler": {"alpha": 2}}`."""
    common: Mapping[str, float]
    """Temperature, truncations and penalties that are given."""
    num_choices: int
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool


def read(given: Mapping[str, Any], longest: int) -> RequestSettings:
    """Reads the fields of a `GenerateConfig` that are not None. Raises ConfigError for one that has no counterpart here.

    Args:
        longest: longest answer in tokens, and that of a request without `max_tokens`.
    """
    fields = {name: value for name, value in given.items() if name not in _UNUSED}
    common = {name: float(fields.pop(name)) for name in _COMMON if name in fields}
    if common.get("top_k") == -1.0:  # another way to say that there is no such truncation
        common["top_k"] = 0.0
    if "top_k" in common:
        common["top_k"] = int(common["top_k"])
    most, choices = fields.pop("max_tokens", longest), fields.pop("num_choices", 1)
    if not 1 <= most <= longest:
        raise ConfigError("max_tokens", most, f"1 to {longest} (-M max_new_tokens={longest})")
    if choices < 1:
        raise ConfigError("num_choices", choices, "1 or more")
    stop = stop_strings(fields.pop("stop_seqs", []), "stop_seqs")
    seed, logprobs, sampler = fields.pop("seed", None), fields.pop("logprobs", False), _sampler(fields.pop("extra_body", {}))
    for name, value in fields.items():
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            allowed = repr(_NEUTRAL[name]) if name in _NEUTRAL else "nothing: models of dflash_mcmc do not have it"
            raise ConfigError(name, value, allowed)
    return RequestSettings(sampler, common, choices, most, tuple(stop), seed, logprobs)


def _sampler(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    sampler = extra.get("sampler", {})
    if set(extra) - {"sampler"} or not isinstance(sampler, Mapping):
        raise ConfigError("extra_body", extra, '{"sampler": {...}} with fields of the sampler')
    return sampler
