"""The options of the groups by the files that define them. Nothing is imported, so that help costs no time."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_REGISTERED = re.compile(r'@register\("(\w+)", "(\w+)"\)\n(?:@.*\n)*class [^\n]*:\n    """([^\n]*?)(?:"""|\n)')


def config_folder() -> Path:
    """`conf/` of the checkout, or the copy inside an installed package."""
    checkout = _PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else _PACKAGE / "conf"


def option_files(more: Sequence[Path] = ()) -> dict[str, dict[str, Path]]:
    """Group -> option -> file, for every group of `conf/`, including groups that are no field of the configuration.

    The file of a component without a file of its own in `conf/` is that of its class.

    Args:
        more: further folders with options, from `--config-dir`.
    """
    groups: dict[str, dict[str, Path]] = {}
    for (group, option), (file, _) in _classes().items():
        groups.setdefault(group, {})[option] = file
    for folder in (config_folder(), *more):
        for file in sorted(folder.glob("*/*.yaml")):
            groups.setdefault(file.parent.name, {})[file.stem] = file
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups)}


@functools.cache
def _classes() -> dict[tuple[str, str], tuple[Path, str]]:
    """(group, option) -> file and first line of the docstring of each component, from the text: nothing is imported."""
    return {(found[1], found[2]): (file, found[3]) for file in (*_PACKAGE.glob("*/*.py"), *_PACKAGE.glob("*/*/__init__.py"))
            for found in _REGISTERED.finditer(file.read_text())}


def meaning_of(group: str, option: str, file: Path) -> str:
    """What an option is: the first comment of its file in `conf/`, or the first line of its class."""
    if file.suffix == ".py":
        return _classes()[group, option][1]
    comments = [line.lstrip("# ").strip() for line in file.read_text().splitlines()
                if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""
