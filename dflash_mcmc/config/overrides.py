"""The words of a command line: flags, the text of overrides, and quotes for texts that Hydra's grammar cannot read."""

import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser  # Hydra has no public parser of its flags; pyproject.toml bounds it
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dflash_mcmc.errors import UserError, shortened

_FIELD = re.compile(r"(?P<field>\+{0,2}(?!hydra\.)\w+(?:\.\w+)+)=(?P<text>.*[{}].*)", re.DOTALL)
"""A field of a group with braces in its value, such as `dataset.prompt={question} Answer briefly.`"""
SHOWING = ("help", "hydra_help", "shell_completion")
"""Flags of Hydra that show something without a configuration."""
OF_PATHS = {"model": "a folder, or a hub name such as Qwen/Qwen3-4B", "draft": "a folder or a hub name",
            "dataset": "a file (JSON Lines or CSV), or a hub name such as openai/gsm8k"}
"""Groups that take a path in place of an option, and what it may be."""
_DATA = (".jsonl", ".json", ".csv", ".gz")


def text_of(override: Override) -> str:
    """The whole override, such as `sampler.alpha=2`. Hydra's parser sets it, though its type allows None."""
    return override.input_line or ""


def given_value(override: Override) -> str:
    """The text after the equals sign."""
    return text_of(override).partition("=")[2]


def with_null(value: Any) -> Any:
    """A parsed value with null for None, which W&B's agent and Python write; in quotes it stays a text."""
    if isinstance(value, dict):
        return {key: with_null(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_null(each) for each in value]
    return None if type(value) is str and value == "None" else value


def quoted(text: str) -> str:
    """A text in quotes, for Hydra's grammar. The grammar reads a backslash as itself, except before a quote."""
    return '"' + re.sub(r'(\\*)("|$)', lambda quote: 2 * quote[1] + ('\\"' if quote[2] else ""), text) + '"'


def looks_like_path(value: str) -> bool:
    """Whether a value can be no name of an option: it has a slash or the suffix of data, or is a folder or file here."""
    return "/" in value or value.endswith(_DATA) or Path(value).exists()


def choices_for(group: str, path: str, written: str) -> tuple[str, str]:
    """The overrides that stand for a path, which the command line has as `written`."""
    option = option_for(group, path)
    return f"{group}={option}", f"{group}.{'model' if (group, option) == ('draft', 'model') else 'path'}={written}"


def option_for(group: str, path: str) -> str:
    """The option that takes a path: `hf`, the kind of draft that a folder's config.json names, or `jsonl` or `hub`."""
    folder = Path(path).expanduser()
    if group == "dataset":
        return "jsonl" if folder.is_file() or path.endswith(_DATA) else "hub"
    if group == "model":
        return "hf"
    described = folder / "config.json"
    text = described.read_text(encoding="utf-8", errors="replace").lower() if described.is_file() else ""
    if "dflash" not in text and "dspark" not in text:
        if "eagle3" in text or "draft_vocab_size" in text:
            return "eagle3"
        if "forcausallm" in text:
            return "model"
    return "dspark" if "dspark" in text else "dflash2" if "dflash2draftmodel" in text else "dflash"


def readable(text: str) -> str:
    """The override as Hydra's grammar can read it. An unreadable value with braces is put in quotes, as one text.

    Any other override is returned unchanged. Raises UserError for a text that is rather several: a comma without a space.
    """
    braced = _FIELD.fullmatch(text)
    if braced is None:
        return text
    with suppress(HydraException):
        OverridesParser.create().parse_override(text)
        return text
    if re.search(r",(?!\s)", braced["text"].rstrip(",")):
        field, text = braced["field"], braced["text"]
        each = ",".join(map(quoted, text.split(",")))
        raise UserError(f"{field.lstrip('+')}: given {text}; allowed: quotes around each value of a sweep, {field}='{each}', "
                        f"or around one text with commas, {field}='{quoted(text)}'")
    return f"{braced['field']}={quoted(braced['text'])}"


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """The flags and overrides of a command line. Raises UserError."""
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]  # Hydra makes the parser, so no subclass can override it
    flags, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        name, equals, value = unknown[0].lstrip("-").partition("=")
        _refuse_flag(shortened(f"{unknown[0]}: no such flag; a field has no dashes: {name.replace('-', '_')}{equals}{value}"))
    for option in ("config_name", "config_path", "experimental_rerun"):
        if getattr(flags, option):
            raise UserError(f"--{option.replace('_', '-')}: given {getattr(flags, option)!r}; allowed: group=option, "
                            "field=value, and a folder of your own options with --config-dir")
    if flags.hydra_help and flags.overrides:
        raise UserError(f"--hydra-help: given with {shortened(' '.join(flags.overrides))}; allowed: --hydra-help alone")
    if flags.config_dir:
        if not Path(flags.config_dir).is_dir():
            raise UserError(f"--config-dir: given {flags.config_dir!r}; allowed: a folder that exists")
        flags.overrides.insert(0, f"hydra.searchpath=['file://{Path(flags.config_dir).resolve()}']")
    return flags


def _refuse_flag(message: str) -> NoReturn:
    raise UserError(f"{message}; allowed: group=option, field=value such as dataset.limit=8, --help, "
                    "and the flags that --hydra-help lists")
