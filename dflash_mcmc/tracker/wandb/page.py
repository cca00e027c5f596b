"""The page itself: looks up what the runs have logged, makes the workspace, and makes the same one anew the next time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import UserError, note
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.tracker.wandb import panels

if TYPE_CHECKING:
    import wandb
    from wandb_workspaces.workspaces import Workspace

_MEDIA = ("image-file", "html-file")
_TIMEOUT = 30  # seconds
_CONFLICT = 409  # the name is taken


class Workspace(NamedTuple):
    """Where the runs are."""

    entity: str
    project: str
    experiment: str | None
    """The group of the runs; None for all of the project."""

    @property
    def title(self) -> str:
        """Name of the page."""
        return f"dflash_mcmc: {self.experiment or 'all experiments'}"


def connect(entity: str | None, project: str, experiment: str | None) -> tuple[wandb.Api, Workspace]:
    """The server, and where the runs are. Never prompts. Raises UserError without a login, a server or an entity."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("not logged in to W&B: wandb login (or WANDB_API_KEY=...), then wandb sync outputs/wandb/offline-run-*"
                        " to upload what was drawn without a login, then this again")
    with asking():
        api = wandb.Api(timeout=_TIMEOUT)
        entity = entity or api.default_entity
    if not entity:
        raise UserError("--entity: not given, and the account has no default; allowed: a user or a team")
    return api, Workspace(entity, project, experiment)


@contextmanager
def asking() -> Iterator[None]:
    """What W&B or the network refuses inside is one line: a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # W&B's client raises errors of many kinds, some of them of private modules
        raise UserError(f"W&B: {type(error).__name__}: {_line(error)}") from error


def make(api: wandb.Api, place: Workspace, swept: Sequence[str], memory: Path) -> str:
    """Makes the workspace, or makes the one that `memory` remembers anew. Returns its address. Raises UserError.

    Args:
        memory: JSON file of the addresses of pages that were made.
    """
    from wandb_workspaces import expr
    from wandb_workspaces.workspaces import RunsetSettings, WorkspaceSettings

    tables, figures = logged(api, place)
    workspace, known = _workspace(place, memory)
    workspace.sections = panels.sections(_preset(api, place.entity), swept, tables, figures)
    workspace.settings = WorkspaceSettings(x_axis="finished", max_runs=panels.MANY)
    workspace.runset_settings = RunsetSettings(
        filters=[expr.Metric("Group") == place.experiment] if place.experiment else [],
        pinned_columns=[f"summary:{column}" for column in panels.COLUMNS])
    with asking():
        workspace.save()
    write_atomically(memory, json.dumps({**known, _key(place): workspace.url}, indent=1) + "\n")
    return workspace.url


def logged(api: wandb.Api, place: Workspace) -> tuple[set[str], set[str]]:
    """Keys under which the runs have logged (tables, figures and pages). Raises UserError where there is no run."""
    with asking():
        filters = {"group": place.experiment} if place.experiment else None
        try:
            summaries = [dict(run.summary) for run in api.runs(f"{place.entity}/{place.project}", filters, lazy=False)]
        except ValueError:  # there is no such project
            summaries = []
    if not summaries:
        of = f" of the experiment {place.experiment}" if place.experiment else ""
        raise UserError(f"{place.entity}/{place.project}: no runs{of} in W&B; draw some with tracker=wandb, and upload what "
                        "was drawn offline: wandb sync outputs/wandb/offline-run-*")
    kinds = [(key, value.get("_type")) for summary in summaries for key, value in summary.items() if hasattr(value, "get")]
    return {key for key, kind in kinds if kind == "table-file"}, {key for key, kind in kinds if kind in _MEDIA}


def _workspace(place: Workspace, memory: Path) -> tuple[Workspace, dict[str, str]]:
    """The page that was made before, else a new one; and all that are remembered."""
    from wandb_workspaces.workspaces import Workspace

    known = json.loads(memory.read_text()) if memory.is_file() else {}
    if _key(place) in known:
        try:
            with asking():
                return Workspace.from_url(known[_key(place)]), known
        except UserError as error:  # someone has deleted it, say
            note(f"{known[_key(place)]} cannot be opened, a new page is made: {error}")
    return Workspace(entity=place.entity, project=place.project, name=place.title), known


def _preset(api: wandb.Api, entity: str) -> str | None:
    """Id of the chart with intervals, which is made where it is not there yet; None, and told, where W&B refuses it."""
    name = panels.preset_name()
    try:
        return api.create_custom_chart(entity=entity, name=name, display_name="Shares with intervals", spec_type="vega2",
                                       access="private", spec=panels.INTERVALS)
    except Exception as error:  # of a private module of W&B's client
        if getattr(getattr(error, "response", None), "http_status", None) == _CONFLICT or "exist" in str(error):
            return f"{entity}/{name}"
        note(f"the chart with intervals is left out, W&B refuses it: {type(error).__name__}: {_line(error)}")
        return None


def _key(place: Workspace) -> str:
    return f"{place.entity}/{place.project}/{place.experiment or ''}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
