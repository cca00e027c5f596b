"""Changes the rotary embedding of a configuration before a model is made of it, as `transformers` has it in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_mcmc.errors import ConfigError, reason_of

FIELD = "model.rope_scaling"
_KEPT = ("rope_theta", "partial_rotary_factor")
"""Parameters that stay unless they are given."""


def override(config: Any, given: Mapping[str, Any]) -> None:
    """Sets the parameters of the rotary embedding.

    Args:
        config: the text configuration of `transformers`, which is changed.
        given: the parameters, such as rope_type and factor; or those of each type of layer, by its name, for a model that has
            several embeddings (Gemma 3, OLMo 3). `original_max_position_embeddings` is by default the configuration's length.

    Raises:
        ConfigError: for a model without such an embedding, or parameters that `transformers` refuses.
    """
    before = getattr(config, "rope_parameters", None)
    if not before:
        raise ConfigError(FIELD, dict(given), "null for a model without a rotary embedding")
    nested = {name for name, value in before.items() if isinstance(value, dict)}
    if nested and not set(given) <= nested:
        raise ConfigError(FIELD, dict(given), f"parameters for each of {', '.join(sorted(nested))}, as in "
                          f"{{{min(nested)}:{{rope_type:yarn,factor:4.0}}}}")
    after = {**before, **{name: _merged(given, before[name], given[name]) for name in given}} if nested else (
        _merged(given, before, given))
    config.rope_parameters = after
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(FIELD, dict(given), f"what transformers accepts ({reason_of(error, 200)})") from error


def _merged(whole: Mapping[str, Any], before: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """The parameters of one embedding. Raises ConfigError for a name or a type that `transformers` does not have."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    names, kinds = sorted(RopeParameters.__annotations__), sorted({"default", *ROPE_INIT_FUNCTIONS})
    if not isinstance(parameters, Mapping) or not set(parameters) <= set(names):
        raise ConfigError(FIELD, dict(whole), f"a mapping with {', '.join(names)}")
    if parameters.get("rope_type") not in kinds:
        raise ConfigError(FIELD, dict(whole), f"a rope_type of {', '.join(kinds)}")
    return {**{name: before[name] for name in _KEPT if before.get(name) is not None}, **parameters}
