"""The values that `conf/` gives to the fields of a component, for its constructor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache

from omegaconf import OmegaConf

from dflash_mcmc.config.command import composer
from dflash_mcmc.config.groups import option_files


def defaults_of(group: str, name: str) -> Mapping[str, object]:
    """The values of `conf/<group>/<name>.yaml` by field, with this machine's own values (`conf/local/`) where there are some.

    A field that the file leaves to the user is missing. A component of another package whose option is not in `conf/` has no
    defaults. Raises UserError.
    """
    return copy.deepcopy(_composed(group, name))


@cache
def _composed(group: str, name: str) -> dict[str, object]:
    if name not in option_files().get(group, {}):
        return {}
    with composer("config") as composing:
        values = composing.compose([f"{group}={name}"]).values[group]
    return {str(field): OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for field, value in values.items_ex(resolve=False) if not OmegaConf.is_missing(values, field)}
