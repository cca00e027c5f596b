"""Copies of installed plugins for the jobs of a grid, so that a later `pip install` or an edit does not reach a queued job.

A plugin is a distribution with an entry point `dflash_mcmc.plugins` (`registry.py`). Its modules are copied, and its
name, version and entry points, so that Python finds the copy first and the original need not stay installed. What the plugin
itself needs is not copied.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from dflash_mcmc.errors import UserError
from dflash_mcmc.registry import PLUGINS

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def copy_plugins(code: Path) -> None:
    """Copies the modules of all installed plugins into the folder `code`.

    Raises UserError for a plugin without files, such as one in an archive, and shutil.Error if the disk is full.
    """
    for distribution in _plugins():
        for name in _modules(distribution):
            _copy_module(name, distribution, code)
        about = code / f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}.dist-info"
        about.mkdir(exist_ok=True)
        for name in ("METADATA", "entry_points.txt"):
            (about / name).write_text(distribution.read_text(name) or _METADATA.format(
                name=distribution.metadata["Name"], version=distribution.version))


_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
"""For a distribution whose metadata has another file name, as in an old kind of installation."""


def _plugins() -> Iterator[Distribution]:
    """The distributions that the entry points belong to, each once."""
    found: dict[str, Distribution] = {}
    for entry_point in importlib.metadata.entry_points(group=PLUGINS):
        if entry_point.dist is not None:
            found.setdefault(entry_point.dist.metadata["Name"], entry_point.dist)
    yield from found.values()


def _modules(distribution: Distribution) -> list[str]:
    """The modules to copy: of the entry points, and all others at the top of the distribution."""
    ours = [entry_point.module.partition(".")[0] for entry_point in distribution.entry_points if entry_point.group == PLUGINS]
    listed = (distribution.read_text("top_level.txt") or "").split()
    files = [file.parts[0] for file in distribution.files or () if file.suffix == ".py" and ".." not in file.parts]
    names = [name.removesuffix(".py") for name in (*ours, *listed, *files)]
    return [name for name in dict.fromkeys(names) if name.isidentifier() and not name.startswith("__editable__")]


def _copy_module(name: str, distribution: Distribution, code: Path) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None:  # a listed name that this installation does not have
        return
    if spec.submodule_search_locations is not None:
        for location in spec.submodule_search_locations:  # several for a namespace package
            if not Path(location).is_dir():
                raise UserError(f"the plugin {distribution.metadata['Name']}: given {location}, which is no folder; allowed: "
                                "an installed plugin whose files a grid can copy")
            shutil.copytree(location, code / name, ignore=LEFT_OUT, dirs_exist_ok=True)
    elif spec.origin is not None and Path(spec.origin).is_file():
        shutil.copy(spec.origin, code)
    else:
        raise UserError(f"the plugin {distribution.metadata['Name']}: given {spec.origin}, which is no file; allowed: an "
                        "installed plugin whose files a grid can copy")
