"""The constructors of components: the defaults of the classes, which are those of the command line, and its checks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dflash_mcmc import registry
from dflash_mcmc.api import component
from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import MISSING, default_of, identity, restored, spec_of
from dflash_mcmc.registry import GROUPS, components, register
from dflash_mcmc.sampler import Sampler
from tests.refusals import refused

EVERY = [found for group in GROUPS for found in components(group).values()]
PowerMH, LayerBlend, HFModel = (components(group)[name].cls for group, name in (
    ("sampler", "power_mh"), ("blend", "layer"), ("model", "hf")))


def test_a_constructor_gives_the_option_of_the_command_line(monkeypatch):
    """It reads no file: this machine's own values (conf/local) are the command line's alone."""
    required = {found: {field.name: "given" for field in dataclasses.fields(found.cls) if default_of(field) == MISSING}
                for found in EVERY}
    required[components("draft")["dflash"]] = {"path": "z-lab/Qwen3-4B-DFlash-b16"}  # conf/ names a checkpoint
    composed = {}
    for number in range(max(len(components(group)) for group in GROUPS)):  # an option of each group at once
        chosen = [list(components(group).values())[number % len(components(group))] for group in GROUPS]
        given = [f"{found.group}.{name}={value}" for found in chosen for name, value in required[found].items()]
        config, _ = compose_once("config", [*(f"{found.group}={found.name}" for found in chosen), *given], Config)
        composed |= {found: getattr(config, found.group) for found in chosen}
    assert component("sampler", "power_mh") == composed[components("sampler")["power_mh"]]
    monkeypatch.setattr("dflash_mcmc.config.compose.compose", None)
    for found, given in required.items():
        assert found.cls(**given) == composed[found]
        for name in given:
            with refused(start=f"{found.group}.{name}: given nothing; allowed: "):
                found.cls(**{other: "given" for other in given if other != name})


def test_every_default_is_allowed():
    wrong = [f"{found.group}={found.name}: {field.name}" for found in EVERY for field in dataclasses.fields(found.cls)
             if (default := default_of(field)) != MISSING and not spec_of(field).admits(default)]
    assert not wrong


def test_a_field_keeps_what_is_given_in_its_type():
    made = PowerMH(alpha=2, num_blocks=np.int64(4), top_p=np.float32(0.5), proposal_temperature=None)
    assert (made.alpha, made.num_blocks, made.top_p, made.num_steps) == (2.0, 4, 0.5, 2)
    assert [type(value) for value in (made.alpha, made.num_blocks, made.top_p)] == [float, int, float]
    assert LayerBlend(layers=(1, 2)).layers == [1, 2]
    assert HFModel(path=Path("a/b")).path == "a/b"
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == dataclasses.replace(made) == made


def test_defaults_are_not_shared():
    sampler = components("sampler")["replica_exchange"].cls
    sampler().alphas.append(9.0)
    assert 9.0 not in sampler().alphas


@pytest.mark.parametrize(("given", "said"), [
    ({"rule": "publised"}, "sampler.rule: given 'publised'; allowed: one of 'exact', 'published'"),
    ({"top_p": 2}, "sampler.top_p: given 2.0; allowed: a number > 0 and <= 1"),
    ({"alpha": -1}, "sampler.alpha: given -1.0; allowed: a number >= 1e-06"),
    ({"alpha": float("nan")}, "sampler.alpha: given nan; allowed: a number >= 1e-06"),
    ({"alpha": "4"}, "sampler.alpha: given '4'; allowed: a number >= 1e-06"),
    ({"alpha": True}, "sampler.alpha: given True; allowed: a number >= 1e-06"),
    ({"alpha": None}, "sampler.alpha: given None; allowed: a number >= 1e-06"),
    ({"num_blocks": 2.0}, "sampler.num_blocks: given 2.0; allowed: a whole number >= 1"),
    ({"rescore": 1}, "sampler.rescore: given 1; allowed: true or false"),
    ({"alpah": 4}, "sampler.alpah: given 4; allowed: a field of PowerMH (did you mean 'alpha'?): alpha, proposal_temperature"),
], ids=str)
def test_a_constructor_refuses_in_one_line(given, said):
    with refused(start=said):
        PowerMH(**given)
    with pytest.raises(ValueError, match="allowed"):
        PowerMH(**given)


def test_entries_of_lists_are_checked():
    with refused(start="blend.layers: given [1, 'a']; allowed: a list of whole numbers ([1,2]) or null"):
        LayerBlend(layers=[1, "a"])
    with refused(start="sampler.alphas: given [1.0, -1.0]; allowed: a list of numbers ([0.5,1]), each >= 1e-06"):
        components("sampler")["replica_exchange"].cls(alphas=[1.0, -1])


def test_conditions_that_span_fields_are_checked_with_the_run(make_config):
    config = make_config("dataset.max_new_tokens=64")
    with refused(start="sampler.num_blocks: given 65; allowed: at most dataset.max_new_tokens=64"):
        PowerMH(num_blocks=65).check(config)


def test_a_required_field_of_another_package(monkeypatch):
    monkeypatch.setattr(registry, "_components", {**registry._components})

    @register("sampler", "of_a_plugin")
    @dataclass(slots=True, kw_only=True)
    class OfAPlugin(Sampler):
        """Of a plugin."""

        size: int = identity(MISSING, "a size", ge=1)

        def chain(self, prompt, horizon, key):
            raise NotImplementedError

    assert OfAPlugin(size=3).size == 3
    with refused(start="sampler.size: given nothing; allowed: a whole number >= 1"):
        OfAPlugin()


def test_recorded_values_are_not_checked():
    """A version before this one may have allowed others."""
    assert restored(PowerMH, {"alpha": -1.0}).alpha == -1.0


def test_a_mistake_of_a_configuration_is_a_value_error_and_a_user_error():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, UserError)
