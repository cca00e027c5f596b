"""`--model_args` of lm_eval and `generation_kwargs` of a task, in this package's terms. lm_eval is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.api.choices import component
from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.overrides import quoted
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, note

if TYPE_CHECKING:
    from dflash_mcmc.sampler import Sampler

_DRAWING = ("sampler", "condition")
_FIELDS = ("blend", "decoder", "draft", "engine", "hardware", "model", "seed", *_DRAWING)
"""Groups and fields of a run that a harness leaves to the model."""
_MOST = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Names of the longest answer, the strongest first, as in lm_eval."""
_DEFAULT_MOST = 256
_TRUNCATIONS = ("top_k", "top_p", "min_p", "repetition_penalty")


class Chosen(NamedTuple):
    """The configuration of `--model_args`."""

    config: Config
    has_sampler: bool
    """Whether a sampler or a condition is given; otherwise each task says how its answers are drawn."""


def chosen(given: Mapping[str, Any]) -> Chosen:
    """Composes `pretrained=FOLDER,condition=ps,sampler.alpha=4`, whose fields are those of a run. Raises UserError."""
    fields = dict(given)
    overrides = ["tracker=none"]
    if (folder := fields.pop("pretrained", None)) is not None:
        overrides += ["model=hf", f"model.path={quoted(str(folder))}"]
    for name in fields:
        if name.partition(".")[0] not in _FIELDS:
            allowed = ("pretrained", "max_length", "enable_thinking", *_FIELDS)
            raise UserError(f"model_args: given {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}, and "
                            "fields such as sampler.alpha")
    overrides += [f"{name}={_written(value)}" for name, value in fields.items()]
    config, _ = compose_once("config", overrides, Config)
    return Chosen(config, any(name.partition(".")[0] in _DRAWING for name in fields))


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Request(NamedTuple):
    """How the answers of some requests are drawn."""

    sampler: Sampler
    max_new_tokens: int
    stop: list[str]


def request(args: Chosen, kwargs: Mapping[str, Any]) -> Request:
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
        return Request(args.config.sampler, most, stop)
    if not samples:
        return Request(component("sampler", "greedy"), most, stop)
    if temperature == 0.0:
        raise ConfigError("generation_kwargs.temperature", temperature, "above 0 with do_sample=true")
    return Request(component("sampler", "temperature", temperature=temperature, **laws), most, stop)
