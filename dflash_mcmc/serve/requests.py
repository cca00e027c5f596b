"""The bodies of requests, in which unknown fields are refused, and the sampler that a request asks for."""

import copy
import dataclasses
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dflash_mcmc.components import name_of, registered
from dflash_mcmc.config.schema import Condition, Config, checked
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.sampler import Sampler

_LARGEST = 2**63 - 1
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
_IGNORED = ("temperature", "top_p")
"""Fields that many clients send always. A sampler that lacks them draws by its own law."""


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _StreamOptions(_Object):
    include_usage: bool = False


class Sampling(_Object):
    """Sampling fields of OpenAI and of vLLM."""

    temperature: float = Field(1.0, ge=0, le=1e6)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0, le=1e6)


class RequestFields(Sampling):
    """The fields of both kinds of requests."""

    model: str | None = None
    user: str | None = None
    n: int = Field(1, ge=1)
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-_LARGEST, le=_LARGEST)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    sampler: dict[str, Any] = {}
    """Fields of the sampler, and `name` if another one was asked for."""
    return_token_ids: bool = False
    return_sampling_mask: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Leaves out what is null. Raises UserError for an unknown field."""
        if not isinstance(given, dict):
            return given
        for name in given:
            if name not in cls.model_fields:
                raise UserError(f"{name[:80]!r}: unknown field{did_you_mean(name, cls.model_fields)}; allowed: "
                                f"{', '.join(cls.model_fields)}, with fields of the sampler in sampler")
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("sampler", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    def given(self) -> dict[str, float]:
        """The given fields of `Sampling`."""
        given = self.model_dump(include=set(Sampling.model_fields), exclude_unset=True)
        return {name: 0 if (name, value) == ("top_k", -1) else value for name, value in given.items()}  # both keep all


class Chat(RequestFields):
    """A request of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False


class Text(RequestFields):
    """A request of `/v1/completions`."""

    prompt: str | _TokenIds | Annotated[list[str | _TokenIds], Field(min_length=1, fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: bool = False


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
    fields, options = {name: value for name, value in asked.items() if name != "name"}, registered("sampler")
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
    neutral = {name: field.default for name, field in Sampling.model_fields.items()}
    neutral |= {"temperature": 0.0} if cls.is_deterministic else {}
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
