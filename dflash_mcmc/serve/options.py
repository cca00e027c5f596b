"""The options of the server: its limits (`serve.*`), and the parts of a run that it uses."""

import copy
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from dflash_mcmc.components import name_of, runtime, walk
from dflash_mcmc.config import command
from dflash_mcmc.config.schema import Config, checked
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean

API_KEY = "DFLASH_MCMC_API_KEY"
_GROUPS = ("model", "draft", "blend", "sampler", "decoder", "hardware", "engine")
_OTHERS = ("condition", "dataset.max_new_tokens", "dataset.stop", "dataset.must_end", "paths.assets")


@dataclass(slots=True, kw_only=True)
class ServeOptions:
    """Address and limits of the server."""

    host: str = runtime("127.0.0.1", "address to listen on; 127.0.0.1 is this machine alone, and 0.0.0.0 every network")
    port: int = runtime(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: str | None = runtime(None, f"key that requests must have; null takes the environment variable {API_KEY}, which "
                                  "does not show in a list of processes, or no key")
    allowed_hosts: list[str] = runtime(
        [], "names in the headers Host and Origin besides serve.host and the loopback names; ['*'] allows all")
    max_prompt_tokens: int | None = runtime(None, "longest prompt; null takes 1,024, or less where the model has fewer "
                                            "positions", ge=1)
    max_width: int = runtime(64, "most draws that a chain of a request may ask for together, such as particles", ge=1)
    max_waiting: int = runtime(1024, "answers that wait for a slot or are drawn; more get status 429", ge=1)
    max_body_bytes: int = runtime(4194304, "longest body of a request; longer ones get status 413", ge=1024)


@dataclass(slots=True, kw_only=True)
class ServePlan:
    """The root of `conf/serve.yaml`."""

    serve: ServeOptions = field(default_factory=ServeOptions)


def compose(overrides: Sequence[str]) -> tuple[ServeOptions, Config]:
    """The server's options and the configuration of its model, which is checked. Raises UserError."""
    limits = [f"serve.{each.name}" for each in fields(ServeOptions)]
    for text in overrides:
        name = text.lstrip("+~-").partition("=")[0]
        if not (name.startswith("serve.") or name.split(".")[0] in _GROUPS or name in _OTHERS):
            raise UserError(f"{name}: has no effect on a server{did_you_mean(name, [*_OTHERS, *_GROUPS, *limits])}; allowed: "
                            f"serve.*, {', '.join(_OTHERS)}, and the groups {', '.join(_GROUPS)} with their fields")
    own = [text for text in overrides if text.startswith("serve.")]
    plan, _ = command.compose_once("serve", own, ServePlan)
    config, _ = command.compose_once("config", ["tracker=none", *(text for text in overrides if text not in own)], Config)
    checked(copy.deepcopy(config))
    key = plan.serve.api_key = plan.serve.api_key or os.environ.get(API_KEY) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("serve.api_key", "nothing of it is shown", "printable ASCII characters")
    return plan.serve, config


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, before a model is loaded. Raises ConfigError for an address that cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a machine is a UnicodeError
        raise ConfigError("serve.port", port, f"a port of serve.host={host} that is free, or 0 for any free one "
                          f"({getattr(error, 'strerror', error)})") from error


def model_name(config: Config) -> str:
    """The name of the model in requests and answers: that of its folder, or on the hub."""
    path = next((value for name, _, _, value in walk(config.model) if name == "path"), None)
    if not isinstance(path, str):
        return name_of(config.model)
    folder = Path(path).expanduser()
    return folder.resolve().name if folder.exists() else path
