"""The snapshot that the jobs of a grid run: the code as of the submission, and the resolved configuration of each point.

A queued job reads neither the checkout nor `conf/` nor an installed plugin: an edit after the submission has no effect on it.
A plugin is a distribution with an entry point `dflash_mcmc.plugins` (`components.py`). Its modules are copied with its name,
version and entry points, so that Python finds the copy first and the original need not stay installed.

Data, checkpoints and other installed packages are not copied. When a job starts, it checks that data and checkpoints have not
changed.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
from functools import reduce
from importlib.metadata import Distribution
from operator import getitem
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mcmc.components import GROUPS, PLUGINS, name_of, walk
from dflash_mcmc.config.identity import as_yaml, identity_hash, literal, node_of
from dflash_mcmc.config.schema import PACKAGE, Config, to_config
from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.options import config_folder

_PATHS = ("path", "prompt_file", "fewshot_path", "model")
"""Last parts of the fields that may name a file or a folder. `grader.model` is a name of an endpoint."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
"""For a distribution whose metadata has another file name, as in an old kind of installation."""


def copy_code(code: Path) -> None:
    """Copies the package, `conf/` and plugins, and notes their commit. Raises UserError if the disk is full."""
    from dflash_mcmc.runner.loop import COMMIT_NOTE, commit

    try:
        shutil.copytree(PACKAGE, code / PACKAGE.name, ignore=LEFT_OUT)
        if config_folder().parent != PACKAGE:
            shutil.copytree(config_folder(), code / "conf", ignore=LEFT_OUT)
        copy_plugins(code)
        (code / COMMIT_NOTE).write_text(json.dumps(commit()) + "\n")
    except shutil.Error as error:  # lists all files that could not be copied
        raise UserError(f"paths.outputs: cannot write to {code}: {error.args[0][0][2]}") from error


def write_point(path: Path, config: Config, code: Path) -> None:
    """Writes the configuration of a point. Paths become absolute, and paths into the package point into the snapshot."""
    settings = dataclasses.asdict(config)
    for name, _, _, value in walk(config):
        if isinstance(value, str):
            *parents, last = name.split(".")
            reduce(getitem, parents, settings)[last] = _moved(name, value, code)
    for group in GROUPS:
        settings[group] = {"name": name_of(getattr(config, group)), **settings[group]}
    path.write_text(as_yaml(settings), encoding="utf-8")


def read_point(path: Path) -> Config:
    """The typed and checked configuration of a point. Raises UserError."""
    try:
        settings = cast(dict[str, Any], yaml.safe_load(path.read_text(encoding="utf-8")))
        composed = OmegaConf.structured(Config)
        for group in GROUPS:
            composed[group] = node_of(group, settings.pop(group))
        composed.merge_with(literal(settings))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: cannot be read as the configuration of a point ({reason_of(error)}); allowed: the file as "
                        "it was written; submit the grid again") from error
    return to_config(composed)


def check_identity(config: Config, digest: str) -> None:
    """Raises UserError if model, draft or dataset have changed since the submission: the run would be another one."""
    current = identity_hash(config)
    if current != digest:
        raise UserError(f"the content of model, draft or dataset has changed since the grid was submitted (run {digest}, now "
                        f"{current}); submit it again")


def _moved(name: str, value: str, code: Path) -> str:
    assets = PACKAGE / "assets"
    if Path(value).is_relative_to(assets):
        return str(code / PACKAGE.name / "assets" / Path(value).relative_to(assets))
    is_path = name in ("paths.outputs", "tracker.folder") or (
        name.rpartition(".")[2] in _PATHS and name != "grader.model" and Path(value).expanduser().exists())
    return os.path.abspath(Path(value).expanduser()) if is_path else value


def copy_plugins(code: Path) -> None:
    """Copies the modules of all installed plugins into the folder `code`.

    Raises UserError for a plugin without files, such as one in an archive, and shutil.Error if the disk is full.
    """
    plugins = {entry_point.dist.metadata["Name"]: entry_point.dist  # a distribution may have several
               for entry_point in importlib.metadata.entry_points(group=PLUGINS) if entry_point.dist is not None}
    for distribution in plugins.values():
        # The modules to copy
        ours = [entry_point.module.partition(".")[0] for entry_point in distribution.entry_points
                if entry_point.group == PLUGINS]
        listed = (distribution.read_text("top_level.txt") or "").split()
        files = [file.parts[0] for file in distribution.files or () if file.suffix == ".py" and ".." not in file.parts]
        names = [name.removesuffix(".py") for name in (*ours, *listed, *files)]
        for name in [name for name in dict.fromkeys(names) if name.isidentifier() and not name.startswith("__editable__")]:
            _copy_module(name, distribution, code)
        about = code / f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}.dist-info"
        about.mkdir(exist_ok=True)
        for name in ("METADATA", "entry_points.txt"):
            (about / name).write_text(distribution.read_text(name) or _METADATA.format(
                name=distribution.metadata["Name"], version=distribution.version))


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
