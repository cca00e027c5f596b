"""`generation_kwargs` of a task of lm_eval, in this package's terms. lm_eval is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.api.choices import component
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.harness.arguments import ModelArguments

if TYPE_CHECKING:
    from dflash_mcmc.sampler import Sampler

_MOST = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Names of the longest answer, the strongest first, as in lm_eval."""
_DEFAULT_MOST = 256
_TRUNCATIONS = ("top_k", "top_p", "min_p", "repetition_penalty")


class GenerationSettings(NamedTuple):
    """How the answers of some requests are drawn."""

    sampler: Sampler
    max_new_tokens: int
    stop: list[str]


def request(args: ModelArguments, kwargs: Mapping[str, Any]) -> GenerationSettings:
    """Reads a task's `generation_kwargs`. Raises UserError for a name or a value that has no counterpart here."""
    fields = dict(kwargs)
    until = fields.pop("until", None) or []
    stop = [text for text in ([until] if isinstance(until, str) else until) if text]
    lengths = [fields.pop(name, None) for name in _MOST]
    most = int(next((length for length in lengths if length is not None), _DEFAULT_MOST))
    temperature, samples = float(fields.pop("temperature", 0.0)), fields.pop("do_sample", None)
    laws = {name: fields.pop(name) for name in _TRUNCATIONS if name in fields}
    if fields:
        name = next(iter(fields))
        allowed = ("until", "do_sample", "temperature", *_TRUNCATIONS, *_MOST)
        raise ConfigError(f"generation_kwargs.{name}", fields[name], ", ".join(allowed))
    samples = temperature > 0 if samples is None else samples
    if args.has_sampler:
        if samples or laws:
            note("lm_eval: the sampler of model_args draws the answers; do_sample, temperature and truncations of tasks have "
                 "no effect")
        return GenerationSettings(args.config.sampler, most, stop)
    if not samples:
        return GenerationSettings(component("sampler", "greedy"), most, stop)
    if temperature == 0.0:
        raise ConfigError("generation_kwargs.temperature", temperature, "above 0 with do_sample=true")
    return GenerationSettings(component("sampler", "temperature", temperature=temperature, **laws), most, stop)
