"""Models of this package for evaluation harnesses, which bring their own tasks, prompts and metrics.

The arguments of a model in a harness are the fields of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.errors import UserError, did_you_mean
from dflash_mcmc.registry import GROUPS, components

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config

_DRAWING = ("sampler", "condition")
_FIELDS = ("model", "hardware", "engine", "blend", "decoder", "draft", "seed", *_DRAWING)
"""Groups and fields of a run that a harness leaves to the model."""


class ModelArguments(NamedTuple):
    """The configuration of a model."""

    config: Config
    has_sampler: bool
    """Whether a sampler or a condition is given; otherwise each task says how its answers are drawn."""


def chosen(given: Mapping[str, Any], others: Sequence[str], where: str, otherwise: Sequence[str] = ()) -> ModelArguments:
    """Composes `pretrained=FOLDER,condition=ps,sampler.alpha=4`, whose fields are those of a run. Raises UserError.

    Args:
        given: the arguments.
        others: names that the caller takes itself, for the message.
        where: what the harness calls the arguments.
        otherwise: overrides where no sampler is given.
    """
    from dflash_mcmc.config.command import compose_once
    from dflash_mcmc.config.overrides import quoted
    from dflash_mcmc.config.schema import Config

    fields = dict(given)
    has_sampler = any(name.partition(".")[0] in _DRAWING for name in fields)
    overrides = ["tracker=none", *(() if has_sampler else otherwise)]
    if (folder := fields.pop("pretrained", None)) is not None:
        overrides += ["model=hf", f"model.path={quoted(str(folder))}"]
    for name in fields:
        if name.partition(".")[0] not in _FIELDS:
            allowed = (*others, *_FIELDS)
            meant = [f"{group}.{name}" for group in _FIELDS if group in GROUPS
                     and any(name in each.cls.__dataclass_fields__ for each in components(group).values())]
            raise UserError(f"{where}: given {name!r}{did_you_mean(name, allowed, meant[:1])}; allowed: {', '.join(allowed)}, "
                            "and fields such as sampler.alpha")
    overrides += [f"{name}={_written(value)}" for name, value in fields.items()]
    config, _ = compose_once("config", overrides, Config)
    return ModelArguments(config, has_sampler)


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
