"""The options of the server: its limits (`serve.*`), and the parts of a run that it uses."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_mcmc.config import command
from dflash_mcmc.config.checks import checked
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.fields import runtime, walk
from dflash_mcmc.registry import name_of

API_KEY = "DFLASH_MCMC_API_KEY"
_GROUPS = ("model", "draft", "blend", "sampler", "decoder", "hardware", "engine")
_OTHERS = ("condition", "dataset.max_new_tokens", "dataset.stop", "dataset.must_end", "paths.assets")


@dataclass(slots=True, kw_only=True)
class ServeOptions:
    """Address and limits of the server."""

    host: str = runtime("127.0.0.1", "address to listen on; 127.0.0.1 is this machine alone, and 0.0.0.0 every network")
    port: int = runtime(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    model_name: str | None = runtime(None, "name of the model in requests and answers; null takes that of the folder or the "
                                     "hub")
    api_key: str | None = runtime(None, f"key that requests must have; null takes the environment variable {API_KEY}, which "
                                  "does not show in a list of processes, or no key")
    seed: int | None = runtime(None, "seed of the answers of requests that give none: they then depend on it, on the prompt "
                               "and on how often this prompt was asked before; null draws a seed for each request", ge=0)
    max_prompt_tokens: int | None = runtime(None, "longest prompt; null takes 1,024, or less where the model has fewer "
                                            "positions", ge=1)
    max_choices: int = runtime(64, "most answers that a request may ask for, over all its prompts", ge=1)
    max_width: int = runtime(64, "most draws that a chain of a request may ask for together, such as particles", ge=1)
    max_steps: int = runtime(10_000, "largest num_steps of a sampler that a request may ask for", ge=1)
    max_waiting: int = runtime(1024, "answers that wait for a slot or are drawn; more get status 429", ge=1)
    max_prompt_characters: int | None = runtime(None, "characters of all texts of a request, before they are tokenized; null "
                                                "takes 64 for each token of the longest prompt", ge=1)
    max_body_bytes: int = runtime(4194304, "longest body of a request; longer ones get status 413", ge=1024)
    max_connections: int = runtime(2048, "connections at once; more get status 503", ge=1)
    body_seconds: float = runtime(30.0, "time in which a client must have sent the body of a request", gt=0)
    stalled_seconds: float = runtime(120.0, "time without a step of the engine, while answers wait, after which /health fails",
                                     gt=0)
    allowed_hosts: list[str] = runtime(
        [], "names in the headers Host and Origin besides serve.host and the loopback names; ['*'] allows all")
    special_tokens_in_text: bool = runtime(False, "whether the name of a special token in a message becomes the token; false "
                                           "leaves it text")
    client_temperature: Literal["refuse", "ignore", "proposal"] = runtime(
        "ignore", "what a request's temperature and top_p do with a sampler without such a field: ignore names them in the "
        "header X-Dflash-Mcmc-Ignored, proposal makes temperature that of the proposals, refuse gives status 400")
    stream_tokens: int = runtime(4, "tokens between two parts of a streamed answer whose sampler draws it in order", ge=1)
    keep_alive_seconds: float = runtime(5.0, "time after which a stream without a part says how far it is", gt=0)
    request_seconds: float = runtime(600.0, "time for the answers to a request, after which their chains end with status 504",
                                     gt=0)


@dataclass(slots=True, kw_only=True)
class ServePlan:
    """The root of `conf/serve.yaml`."""

    serve: ServeOptions = dataclasses.field(default_factory=ServeOptions)


def compose(overrides: Sequence[str]) -> tuple[ServeOptions, Config]:
    """The server's options and the configuration of its model, which is checked. Raises UserError."""
    names = [each.name for each in dataclasses.fields(ServeOptions)]
    for text in overrides:
        name = text.lstrip("+~-").partition("=")[0]
        if not (name.startswith("serve.") or name.split(".")[0] in _GROUPS or name in _OTHERS):
            near = did_you_mean(name, *((), [f"serve.{name}"]) if name in names else ([*_OTHERS, *_GROUPS, *names],))
            raise UserError(f"{name}: has no effect on a server{near}; allowed: serve.*, {', '.join(_OTHERS)}, and the groups "
                            f"{', '.join(_GROUPS)} with their fields")
    own = [text for text in overrides if text.startswith("serve.")]
    others = [text for text in overrides if not text.startswith("serve.")]
    plan, _ = command.compose_once("serve", own, ServePlan)
    config, _ = command.compose_once("config", ["tracker=none", *others], Config)
    checked(copy.deepcopy(config))
    if plan.serve.api_key is None:
        plan.serve.api_key = os.environ.get(API_KEY) or None
    if plan.serve.api_key is not None and not (plan.serve.api_key.isascii() and plan.serve.api_key.isprintable()):
        raise UserError("serve.api_key: given a key with other characters; allowed: printable ASCII characters")
    return plan.serve, config


def model_name(options: ServeOptions, config: Config) -> str:
    """The name of the model in requests and answers."""
    if options.model_name is not None:
        return options.model_name
    path = next((value for name, _, _, value in walk(config.model) if name == "path"), None)
    if not isinstance(path, str):
        return name_of(config.model)
    folder = Path(path).expanduser()
    return folder.resolve().name if folder.exists() else path
