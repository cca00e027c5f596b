"""`generation_kwargs` of a task of lm_eval, in this package's terms. lm_eval is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dflash_mcmc.api.choices import component
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.harness import ModelArguments

if TYPE_CHECKING:
    from dflash_mcmc.sampler import Sampler

_MOST = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Names of the longest answer, the strongest first, as in lm_eval."""
NO_CACHE = "because its key of an answer has neither the sampler and its fields nor the number of the repeat"
"""Why the option `use_cache` of lm_eval, which takes answers of earlier evaluations again, is off."""
_DEFAULT_MOST = 256
_Number = TypeVar("_Number", int, float)
_TRUNCATIONS = ("top_k", "top_p", "min_p", "repetition_penalty")


class GenerationSettings(NamedTuple):
    """How the answers of some requests are drawn."""

    sampler: Sampler
    max_new_tokens: int
    stop: list[str]


def request(args: ModelArguments, kwargs: Mapping[str, Any]) -> GenerationSettings:
    """Reads a task's `generation_kwargs`. Raises UserError for a name or a value that has no counterpart here."""
    fields = dict(kwargs)
    stop = _until(fields.pop("until", None))
    lengths = {name: fields.pop(name, None) for name in _MOST}
    most = next((_number(name, length, int, 1) for name, length in lengths.items() if length is not None), _DEFAULT_MOST)
    temperature, samples = _number("temperature", fields.pop("temperature", 0.0), float, 0), fields.pop("do_sample", None)
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
        if (penalty := laws.get("repetition_penalty", 1.0)) != 1.0:
            raise ConfigError("generation_kwargs.repetition_penalty", penalty, "1 with do_sample=false: greedy answers here "
                              "have no penalty")
        return GenerationSettings(component("sampler", "greedy"), most, stop)
    if temperature == 0.0:
        raise ConfigError("generation_kwargs.temperature", temperature, "above 0 with do_sample=true")
    return GenerationSettings(component("sampler", "temperature", temperature=temperature, **laws), most, stop)


def without_cache(arguments: Sequence[str]) -> list[str]:
    """The arguments of lm_eval's command without `--use_cache` and its file, with a note, where the model is ours."""
    kept, rest = [], iter(arguments)
    ours = any(text in ("dflash_mcmc", "--model=dflash_mcmc") for text in arguments)
    for text in rest:
        name, _, file = text.partition("=")
        if not (ours and name in ("--use_cache", "-c")):
            kept.append(text)
            continue
        file = file or next(rest, "")
        note(f"lm_eval: --use_cache {file} has no effect with --model dflash_mcmc, {NO_CACHE}")
    return kept


def _until(until: Any) -> list[str]:
    texts = [until] if isinstance(until, str) else until or []
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("generation_kwargs.until", until, "a text or a list of texts")
    return [text for text in texts if text]


def _number(name: str, value: Any, kind: Callable[[Any], _Number], least: int) -> _Number:
    try:
        number = kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation_kwargs.{name}", value, "a number") from error
    if not least <= number < math.inf:
        raise ConfigError(f"generation_kwargs.{name}", value, f"a number >= {least}")
    return number
