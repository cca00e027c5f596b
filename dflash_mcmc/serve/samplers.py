"""The sampler of a request, and the configuration that it is checked with."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_mcmc.config.schema import Condition, Config, checked
from dflash_mcmc.errors import ConfigError, did_you_mean
from dflash_mcmc.registry import components, name_of
from dflash_mcmc.sampler import Sampler

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0}
_IGNORED = ("temperature", "top_p")
"""Fields that many clients send always. A sampler that lacks them draws by its own law."""


def config_of(server: Config, sampler: Sampler, max_tokens: int, max_width: int) -> Config:
    """The checked configuration of a request. Raises UserError.

    Args:
        server: the server's configuration as it was composed; it is not changed.
        max_tokens: longest answer.
        max_width: most operations that a chain may ask for together.
    """
    config = copy.deepcopy(server)
    config.condition = Condition(name=None, sampler=None, blend=None)
    config.sampler, config.dataset.max_new_tokens = sampler, max_tokens
    config = checked(config)
    if config.sampler.needs_draft and not (server.sampler.needs_draft or server.blend.needs_draft):
        raise ConfigError("sampler", name_of(sampler), "one without a draft, or this sampler from the start")
    if (width := config.sampler.width()) > max_width:
        raise ConfigError("sampler", f"one that draws {width} sequences together", f"at most {max_width} (serve.max_width)")
    return config


def sampler_of(own: Sampler, asked: Mapping[str, Any], common: Mapping[str, float]) -> tuple[Sampler, dict[str, float]]:
    """The sampler of a request, and those of its common fields that have no effect. Raises ConfigError.

    Args:
        own: the server's sampler, whose fields are the defaults unless `asked` names another one.
        asked: fields of the sampler, and `name` for another one.
        common: the fields that requests of every server have: temperature, top_p, top_k, min_p, and penalties.
    """
    fields, options = {name: value for name, value in asked.items() if name != "name"}, components("sampler")
    name = asked.get("name", name_of(own))
    if not isinstance(name, str) or name not in options:
        raise ConfigError("sampler", name, f"one of {', '.join(options)}{did_you_mean(str(name), options)}")
    for field, value in fields.items():
        if field in ("function", "self"):  # a file that would be run here; Python's own argument
            raise ConfigError(f"sampler.{field}", value, "nothing in a request")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"sampler.{field}", value, "a number of 64 bits")
    same = name == name_of(own)
    if name == "temperature" and common.get("temperature") == 0.0:
        if same and own.law().has_penalty:
            raise ConfigError("temperature", 0.0, "a number > 0 with this server's penalties, which sampler=greedy lacks")
        name, same = "greedy", False
    cls: Any = options[name].cls
    names = {field.name for field in dataclasses.fields(cls)}
    neutral = {**_NEUTRAL, "temperature": 0.0} if cls.is_deterministic else _NEUTRAL
    ignored: dict[str, float] = {}
    for field, value in common.items():
        if field in names and (field, value) != ("temperature", 0.0):
            if fields.setdefault(field, value) != value:
                raise ConfigError(field, value, f"nothing, since sampler.{field} is given")
        elif value == neutral[field] or (cls.is_deterministic and field in ("top_p", "top_k", "min_p")):
            pass
        elif field in _IGNORED:
            ignored[field] = value
        else:
            raise ConfigError(field, value, f"{neutral[field]:g} with sampler={name}, which has no such field; its fields, in "
                              f"sampler: {', '.join(sorted(names))}")
    return cls(**{**({field: getattr(own, field) for field in names} if same else {}), **fields}), ignored
