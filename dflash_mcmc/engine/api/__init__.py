"""Any OpenAI-style completions endpoint: vLLM, SGLang or llama.cpp on other machines, or this package's own server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dflash_mcmc.components import Need, Settings, identity, name_of, register, runtime
from dflash_mcmc.engine import DelegatedEngine
from dflash_mcmc.engine.batching.interface import ChainRunner
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.process.http import check_url

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.engine.batching.elsewhere import UnloadedTarget

_REQUESTS = 16
"""Requests at once where `hardware.num_slots` is null."""


@register("engine", "api")
@dataclass(slots=True, kw_only=True)
class Api(DelegatedEngine):
    """A server that draws suffixes and tells their log probabilities; model.path has the tokenizer alone."""

    takes_potential: ClassVar[bool] = True
    is_remote: ClassVar[bool] = True
    needs = (*(Need(f"{group}.is_null", why=", or engine=slots, which reads layers and runs drafts")
               for group in ("probe", "blend", "draft", "decoder")),)

    url: str | None = runtime(None, "endpoint, such as http://127.0.0.1:8000/v1; prompts are sent there")
    model: str | None = runtime(None, "name of the model, as the endpoint knows it; null takes the first one; the name is "
                                "part of the identity, with that of the server")
    logprobs: Literal["raw", "processed", "top"] = identity(
        "raw", "what the server's log probabilities are: raw = those of the model, at any temperature; processed = those of "
        "the law that it draws from (vLLM's logprobs_mode, SGLang), so that a second request scores the tokens; top = raw, "
        "and a proposal's follow from lists of sampler.top_k tokens (llama.cpp)")
    body: Any = identity(None, "further fields of each request for tokens, such as {ignore_eos:false}")
    audit: bool = identity(True, "check the server before its first token is believed; false stands in the report")
    api_key_env: str | None = runtime(None, "variable of the environment with the API key, which is never stored; null sends "
                                      "none")
    timeout_seconds: float = runtime(600.0, "limit on one request", gt=0)
    patience_seconds: float = runtime(600.0, "time from a request's first failure in which it is sent again after 429, 5xx, "
                                    "resets and timeouts", gt=0)

    def check(self, config: Settings) -> None:
        """Checks the URL, and that no part needs more than drawn tokens and their log probabilities. Raises ConfigError."""
        from dflash_mcmc.engine.api.endpoint import OWN_FIELDS

        check_url("engine.url", self.url)
        if not (self.body is None or isinstance(self.body, dict)):
            raise ConfigError("engine.body", self.body, "null, or a mapping such as {ignore_eos:false}")
        if taken := [name for name in self.body or () if name in OWN_FIELDS]:
            raise ConfigError("engine.body", ", ".join(taken), "fields that a request does not set itself, such as "
                              "ignore_eos; the sampler's fields state its law")
        instead = "with engine=api, or engine=slots"
        if config.model.rope_override() is not None:
            raise ConfigError("model.rope_scaling", config.model.rope_override(), f"null {instead}: the server's own holds")
        if config.sampler.needs_draft or config.sampler.source() == "draft":
            raise ConfigError("sampler", name_of(config.sampler), f"one without a draft {instead}")
        if config.sampler.reads_rows():
            raise ConfigError("sampler", name_of(config.sampler), "one that needs log p of its own tokens alone, without "
                              f"cut=entropy and sampling_mask, {instead}, which has every logit")

    def fingerprint(self) -> str:
        """The server and the model, as the server names them. Raises UserError for a server that cannot be reached."""
        from dflash_mcmc.engine.api.endpoint import Endpoint

        endpoint = Endpoint(self)
        return f"{endpoint.kind} {endpoint.model}"

    def load(self, config: Settings, device: str) -> "UnloadedTarget":
        """The tokenizer and the stop ids of model.path; the weights are the server's. Raises UserError."""
        from dflash_mcmc.engine.api.endpoint import Endpoint
        from dflash_mcmc.engine.batching import elsewhere

        files = config.model.files(weights=False)
        if files is None:
            raise UserError("model: given a model that is loaded already; allowed: the folder or the hub name of a tokenizer "
                            "and config.json with engine=api, or engine=slots")
        target = elsewhere.read(files.folder, "auto", "cpu", config.model.tokenizer())
        limits = [limit for limit in (target.max_positions, Endpoint(self).longest) if limit]
        return target._replace(max_positions=min(limits, default=None))

    def start(self, config: Settings, target: "UnloadedTarget", prompt_length: int, num_chains: int,
              second: "Mapping[bytes, np.ndarray] | None" = None) -> ChainRunner:
        """Requests to the server, which is audited first. Raises UserError for a server that is not what is stated."""
        from dflash_mcmc.engine.api.audit import audited
        from dflash_mcmc.engine.api.endpoint import Endpoint
        from dflash_mcmc.engine.api.session import ApiEngine

        endpoint, law, width = Endpoint(self), config.sampler.law(), config.sampler.width()
        endpoint.check_law(law, target.vocab_size)
        slots = config.hardware.num_slots or _REQUESTS
        if self.audit:
            audited(endpoint, config, target, self.logprobs, slots)
        else:
            note("engine.audit=false: what the server says of its tokens is believed without a check")
        return ApiEngine(target.stopping_at(config.dataset.stop), endpoint, self.logprobs, slots, max(1, slots // width))
