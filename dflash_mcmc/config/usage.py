"""The text of `--help` for commands that compose one configuration: the usage and the fields. No model library is imported."""

from __future__ import annotations

import dataclasses
import typing

from dflash_mcmc.fields import has_spec, shown_default, spec_of


def text(description: str, plans: dict[str, type]) -> str:
    """The description, then the fields of each plan below its heading. `plans` maps headings to configuration classes."""
    sections = ["\n".join([f"{heading}:", *field_lines(plan)]) for heading, plan in plans.items()]
    note = "A field is set by FIELD=VALUE. Fields marked identity change the result; fields marked runtime do not."
    return "\n\n".join([description.strip(), *sections, note])


def field_lines(plan: type) -> list[str]:
    """Role, allowed values, default and meaning of every field, one field a line. Names of nested fields are dotted."""
    found = _fields(plan, "")
    width = max([20, *(len(name) for name, *_ in found)])
    return [f"  {name:<{width}} {role:<9} {meaning}" for name, role, meaning in found]


def _fields(plan: type, prefix: str) -> list[tuple[str, str, str]]:
    """(name, role, meaning) of each field; fields without a specification are groups and are left out."""
    found, types = [], typing.get_type_hints(plan)
    for field in dataclasses.fields(plan):
        declared = types[field.name]
        if isinstance(declared, type) and dataclasses.is_dataclass(declared):
            found += _fields(declared, f"{prefix}{field.name}.")
        elif has_spec(field):
            spec = spec_of(field)
            allowed = f"{spec.describe(declared)}; default {shown_default(field)}"
            found.append((prefix + field.name, spec.role, f"{allowed}: {spec.help}"))
    return found
