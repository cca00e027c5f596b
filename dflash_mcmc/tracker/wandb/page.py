"""The W&B workspace page: finds the data that the runs logged, and creates the page or updates an existing page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import UserError, note, reason_of
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.tracker.wandb import panels

if TYPE_CHECKING:
    import wandb
    from wandb_workspaces.workspaces import Workspace as Page

_MEDIA = ("image-file", "html-file")
_TIMEOUT = 30  # seconds
_CONFLICT = 409  # HTTP status: the name is taken


class Workspace(NamedTuple):
    """The place of the runs in W&B."""

    entity: str
    project: str
    experiment: str | None
    """The W&B group of the runs; None for all runs of the project."""

    @property
    def title(self) -> str:
        """Name of the page."""
        return f"dflash_mcmc: {self.experiment or 'all experiments'}"


def connect(entity: str | None, project: str, experiment: str | None) -> tuple[wandb.Api, Workspace]:
    """Connects to the server. Returns the connection and the place of the runs. Never prompts. Raises UserError on failure."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("not logged in to W&B: run wandb login (or set WANDB_API_KEY=...), then wandb sync "
                        "outputs/wandb/offline-run-* to upload runs made without a login, then repeat this command")
    with asking():
        api = wandb.Api(timeout=_TIMEOUT)
        entity = entity or api.default_entity
    if not entity:
        raise UserError("--entity: not given, and the account has no default; allowed: a user or a team")
    return api, Workspace(entity, project, experiment)


@contextmanager
def asking() -> Iterator[None]:
    """A context that turns every error of W&B or the network into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # W&B's client raises many types, some of them from private modules
        raise UserError(f"W&B: {type(error).__name__}: {_line(error)}") from error


def make(api: wandb.Api, place: Workspace, swept: Sequence[str], memory: Path) -> str:
    """Creates the workspace, or updates the one that `memory` remembers. Returns its address. Raises UserError.

    Args:
        memory: JSON file with the addresses of the pages created so far.
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
    """The keys of the logged tables, and the keys of the logged figures and pages. Raises UserError if no run exists."""
    with asking():
        filters = {"group": place.experiment} if place.experiment else None
        try:
            summaries = [dict(run.summary) for run in api.runs(f"{place.entity}/{place.project}", filters, lazy=False)]
        except ValueError:  # the project does not exist
            summaries = []
    if not summaries:
        of = f" of the experiment {place.experiment}" if place.experiment else ""
        raise UserError(f"{place.entity}/{place.project}: no runs{of} in W&B; make runs with tracker=wandb, and upload "
                        "offline runs: wandb sync outputs/wandb/offline-run-*")
    kinds = [(key, value.get("_type")) for summary in summaries for key, value in summary.items() if hasattr(value, "get")]
    return {key for key, kind in kinds if kind == "table-file"}, {key for key, kind in kinds if kind in _MEDIA}


def _workspace(place: Workspace, memory: Path) -> tuple[Page, dict[str, str]]:
    """(page, addresses): the page that was created before, or a new page; and all remembered addresses."""
    from wandb_workspaces.workspaces import Workspace as Page

    known = json.loads(memory.read_text()) if memory.is_file() else {}
    if _key(place) in known:
        try:
            with asking():
                return Page.from_url(known[_key(place)]), known
        except UserError as error:  # for example because it was deleted
            note(f"{known[_key(place)]} cannot be opened; creating a new page: {error}")
    return Page(entity=place.entity, project=place.project, name=place.title), known


def _preset(api: wandb.Api, entity: str) -> str | None:
    """Id of the chart with intervals, which is created if necessary. Prints a note and returns None if W&B refuses it."""
    name = panels.preset_name()
    try:
        return api.create_custom_chart(entity=entity, name=name, display_name="Shares with intervals", spec_type="vega2",
                                       access="private", spec=panels.INTERVALS)
    except Exception as error:  # from a private module of W&B's client
        if getattr(getattr(error, "response", None), "http_status", None) == _CONFLICT or "exist" in str(error):
            return f"{entity}/{name}"
        note(f"the chart with intervals is left out because W&B refuses it: {type(error).__name__}: {_line(error)}")
        return None


def _key(place: Workspace) -> str:
    return f"{place.entity}/{place.project}/{place.experiment or ''}"


def _line(error: Exception) -> str:
    return reason_of(error, 200)
