"""The bodies of requests. Unknown fields are refused."""

import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dflash_mcmc.errors import UserError, did_you_mean

_LARGEST = 2**63 - 1
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]


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
