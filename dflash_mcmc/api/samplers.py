"""The sampler of a request: the configured one with other fields, or another one, checked against the whole configuration."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from dflash_mcmc.config.checks import checked
from dflash_mcmc.config.schema import Condition, Config
from dflash_mcmc.errors import ConfigError, did_you_mean
from dflash_mcmc.fields import identity_values
from dflash_mcmc.registry import components, name_of

if TYPE_CHECKING:
    from dflash_mcmc.sampler import Sampler

_MOST = 256
_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


class Samplers:
    """Makes the configurations of requests, and keeps the latest.

    Args:
        config: the configuration as it was composed; it is not changed.
        max_width: most operations that a chain may ask for together; None for no limit.
        max_steps: largest `num_steps` that a request may give; None for no limit.
    """

    def __init__(self, config: Config, max_width: int | None = None, max_steps: int | None = None):
        self._config, self._max_width, self._max_steps = copy.deepcopy(config), max_width, max_steps
        self._config.condition = Condition(name=None, sampler=None, blend=None)
        self._has_draft = config.sampler.needs_draft or config.blend.needs_draft
        self._own_steps = _steps(config)
        self._made: dict[str, Config] = {}
        self._lock = threading.Lock()

    def config_for(self, fields: Mapping[str, Any], common: Mapping[str, float], max_tokens: int) -> Config:
        """The checked configuration of a request. Raises ConfigError, and UserError for what does not fit together.

        Args:
            fields: of the sampler, and `name` for another sampler.
            common: values of the fields that requests of every server have: temperature, top_p, top_k, and penalties.
            max_tokens: longest answer.
        """
        key = json.dumps([fields, common, max_tokens], sort_keys=True)
        with self._lock:
            if key not in self._made:
                while len(self._made) >= _MOST:
                    self._made.pop(next(iter(self._made)))
                self._made[key] = self._checked(self._sampler(fields, common), max_tokens)
            return self._made[key]

    def _checked(self, sampler: Sampler, max_tokens: int) -> Config:
        config = copy.deepcopy(self._config)
        config.sampler, config.dataset.max_new_tokens = sampler, max_tokens
        config = checked(config)
        if config.sampler.needs_draft and not self._has_draft:
            raise ConfigError("sampler", name_of(sampler), "one without a draft, or this sampler from the start")
        if self._max_width is not None and (width := config.sampler.width()) > self._max_width:
            raise ConfigError("sampler", f"a sampler that draws {width} sequences together", f"at most {self._max_width} "
                              "(serve.max_width)")
        steps = _steps(config)
        if self._max_steps is not None and steps > (most := max(self._max_steps, self._own_steps)):
            raise ConfigError("sampler.num_steps", steps, f"at most {most} (serve.max_steps, or the server's own)")
        return config

    def _sampler(self, asked: Mapping[str, Any], common: Mapping[str, float]) -> Sampler:
        """The sampler with the fields of the request, among them the common ones that it has. Raises ConfigError."""
        base, fields = self._config.sampler, {name: value for name, value in asked.items() if name != "name"}
        known, own = components("sampler"), name_of(base)
        name = asked.get("name", own)
        if name not in known:
            raise ConfigError("sampler", name, f"one of {', '.join(known)}{did_you_mean(name, known)}")
        cls = known[name].cls
        if common.get("temperature") == 0.0 and "temperature" in _names(cls):
            cls, name, fields = known["greedy"].cls, "greedy", {}
        if "self" in fields:  # Python's own argument of every constructor
            raise ConfigError("sampler.self", fields["self"], f"fields of sampler={name}: {', '.join(sorted(_names(cls)))}")
        values = {field: getattr(base, field) for field in _names(cls)} if name == own else {}
        return cls(**{**values, **fields, **_shared(cls, name, fields, common)})


def _shared(cls: Any, name: str, fields: Mapping[str, Any], given: Mapping[str, float]) -> dict[str, float]:
    """The common fields that the sampler has. Raises ConfigError for others that are not off."""
    found: dict[str, float] = {}
    for field, value in given.items():
        if field in fields and fields[field] != value:
            raise ConfigError(field, value, f"nothing, since sampler.{field} is given")
        off = 0.0 if cls.is_deterministic and field == "temperature" else _OFF[field]
        if field in _names(cls):
            found[field] = value
        elif value != off and not (cls.is_deterministic and field in ("top_p", "top_k")):
            raise ConfigError(field, value, f"{off:g} with sampler={name}, which has no such field; its fields, in "
                              f"sampler: {', '.join(sorted(_names(cls)))}")
    return found


def _steps(config: Config) -> int:
    """The Metropolis-Hastings steps of a stage; 0 for a sampler without steps."""
    return cast("int", identity_values(config.sampler).get("num_steps", 0))


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}
