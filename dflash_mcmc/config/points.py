"""The jobs of a command line's points. A job leaves out what does not apply to its point. Points that do the same share a job.

A field does not apply to a point whose options do not have it. A group does not apply to a point whose probe does not use it.
A field or a group that applies to no point is an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from hydra.core.override_parser.types import Override

from dflash_mcmc.config import mistakes
from dflash_mcmc.config.checks import to_config
from dflash_mcmc.config.compose import Composer
from dflash_mcmc.config.identity import effects_of
from dflash_mcmc.config.jobs import Job
from dflash_mcmc.config.overrides import text_of
from dflash_mcmc.config.schema import Config, component_of, to_typed, unused
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.fields import has_spec, spec_of
from dflash_mcmc.registry import GROUPS, components, name_of

Texts = tuple[str, ...]
_INPUTS = ("model", "draft", "dataset")
"""Groups whose options can be left out, because some experiments do not use these groups."""


def job_of(composing: Composer, texts: Sequence[str], optional: frozenset[str] = frozenset()) -> Job:
    """The checked job of overrides without swept values. Raises UserError.

    If an experiment chooses the probe, a model, draft or dataset that the probe does not use is left out with a note. One
    command line therefore suits all experiments.

    Args:
        optional: names of the fields and groups that are left out if they do not apply.
    """
    kept = _applying(composing, tuple(texts), optional)
    values, choices = composing.compose(kept)
    config = to_config(values)
    overrides = [composing.parse(text) for text in kept]
    may_be_idle = () if any(override.key_or_group == "probe" for override in overrides) else _INPUTS
    for override in _idle(config, overrides):
        name, _, value = text_of(override).lstrip("+~").partition("=")
        if name in may_be_idle:
            note(f"{name}={value} is left out where nothing uses it: probe={name_of(config.probe)}")
            continue
        probe = name_of(config.probe)
        raise ConfigError(name, value, f"no override of {_group(override)}, since probe={probe} does not use it")
    left_out = tuple(composing.parse(text).key_or_group for text in texts if text not in kept)
    return Job(config, tuple(text_of(one) for one in overrides if not one.is_hydra_override()), choices, left_out)


def note_idle(job: Job, overrides: Sequence[Override]) -> None:
    """Prints a note for each override of a job that has no effect. In a sweep such values are common, outside it a mistake."""
    for override in overrides:
        group, dot, last = override.key_or_group.partition(".")
        if not dot or group not in GROUPS:
            continue
        component, chosen = component_of(job.config, group), job.choices[group]
        if group == "draft" and component.is_null and chosen != name_of(component):
            note(f"{override.key_or_group} has no effect: nothing uses draft={chosen}")
        elif any(spec_of(field).no_effect for field in dataclasses.fields(component)
                 if field.name == last and has_spec(field)):
            note(f"{override.key_or_group} has no effect with {group}={chosen}")


def optional_of(composing: Composer, points: Sequence[Sequence[str]], named: Collection[str]) -> frozenset[str]:
    """The names of the fields and groups that apply to some of the points but not to all, and the names in `named`.

    Raises UserError for a field that no point has and that is not in `named`.
    """
    lacking = [composing.lacking(texts) for texts in points]
    nowhere = {name for name in lacking[0] if all(name in each for each in lacking)} - set(named)
    if nowhere and len(points) > 1:
        name = next(name for name in composing.lacking(points[0]) if name in nowhere)
        known = {field for texts in points for field in composing.known_fields(name.rpartition(".")[0], texts)}
        raise mistakes.in_no_point(name, sorted(known))
    optional = frozenset(named) | {name for each in lacking for name in each} - nowhere
    idle = [_idle_names(composing, _applying(composing, tuple(texts), optional)) for texts in points]
    return optional | {name for each in idle for name in each if not all(name in other for other in idle)}


def jobs_of(composing: Composer, points: Sequence[Sequence[str]], optional: frozenset[str]) -> Iterator[Job]:
    """The checked job of each point of a grid, in order. Points that do the same share the job of the first one.

    A job leaves out overrides that do not apply to it, and swept values that have no effect in it. Raises UserError.
    """
    kept = [_applying(composing, tuple(texts), optional) for texts in points]
    jobs = {texts: job_of(composing, texts) for texts in dict.fromkeys(kept)}
    effects = {texts: _effects(job) for texts, job in jobs.items()}
    alike: dict[str, list[int]] = {}
    for number, texts in enumerate(kept):
        alike.setdefault(effects[texts], []).append(number)
    named = [{composing.parse(text).get_key_element(): text for text in texts} for texts in points]
    for same, numbers in alike.items():
        first = points[numbers[0]]
        needed = kept[numbers[0]]
        if len(numbers) > 1:
            needed = _without_idle_values(composing, named, numbers, needed, same)
        job = jobs[needed] if needed in jobs else job_of(composing, needed)
        yield job._replace(left_out=tuple(composing.parse(text).key_or_group for text in first if text not in needed))


def _without_idle_values(composing: Composer, points: Sequence[Mapping[str, str]], alike: Sequence[int], texts: Texts,
                         effects: str) -> Texts:
    """The overrides of the first point in `alike`, without the swept values that have no effect in it.

    Swept values of some fields have no effect if every combination of these values, with the other fields as in the first
    point, is in `alike`, and if the first point does the same without these values.

    Args:
        points: the text of each override, by name, for every point of the grid.
        alike: the numbers of points that do the same.
        texts: the overrides of the first point in `alike`.
        effects: the effects of all points in `alike`.
    """
    values = {name: {point[name] for point in points} for name in points[0]}
    swept = [name for name, found in values.items() if len(found) > 1]
    first = points[alike[0]]
    idle = {name for name in swept if first[name] not in texts}
    for name in swept:
        more = idle | {name}
        left = tuple(text for text in texts if text not in {first[other] for other in more})
        combined = {tuple(points[number][other] for other in swept if other in more) for number in alike
                    if all(points[number][other] == first[other] for other in swept if other not in more)}
        if len(combined) == math.prod(len(values[other]) for other in more) and _does(composing, left, effects):
            idle, texts = more, left
    return texts


def _does(composing: Composer, texts: Texts, effects: str) -> bool:
    """Whether overrides compose and have these effects."""
    try:
        return _effects(job_of(composing, texts)) == effects
    except UserError:  # a needed value is missing, such as the draft
        return False


def _effects(job: Job) -> str:
    return json.dumps(effects_of(job.config), sort_keys=True, default=str)


def _applying(composing: Composer, texts: Texts, optional: frozenset[str]) -> Texts:
    """The overrides without those that are optional and do not apply. Raises UserError."""
    if not optional:
        return texts
    out = optional.intersection(composing.lacking(texts))
    kept = tuple(text for text in texts if composing.parse(text).key_or_group not in out)
    idle = optional.intersection(_idle_names(composing, kept)) if optional else set()
    return tuple(text for text in kept if composing.parse(text).key_or_group not in idle)


def _idle_names(composing: Composer, texts: Texts) -> set[str]:
    """The names of the overrides of groups that the probe does not use. Raises UserError."""
    known = components("probe").get(composing.choices(texts)["probe"])
    if known is not None and known.cls.is_null:
        return set()
    config = to_typed(composing.compose(texts).values, Config)
    return {override.key_or_group for override in _idle(config, [composing.parse(text) for text in texts])}


def _idle(config: Config, overrides: Sequence[Override]) -> list[Override]:
    """The overrides of groups that the probe does not use."""
    idle = unused(config)
    return [override for override in overrides if _group(override) in idle]


def _group(override: Override) -> str:
    return override.key_or_group.partition("/")[0].partition(".")[0]
