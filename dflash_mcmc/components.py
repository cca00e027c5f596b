"""The common base class of all components. Each group has a base class derived from it in `dflash_mcmc/<group>/`."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from dflash_mcmc.settings import Settings


class Component(ABC):
    """A part of a run that the configuration chooses. A leaf is a dataclass that inherits its group's base class.

    The methods are hooks: a leaf overrides those that it needs. They load no model. A class with slots cannot use `super()`
    without arguments, so an override calls the base class by its name.
    """

    __slots__ = ()

    group: ClassVar[str]
    """Group of the configuration: `sampler`, `blend`, ..."""
    presets: ClassVar[tuple[str, ...]] = ()
    """Options of the group, besides the component's own name, that configure this component."""
    is_null: ClassVar[bool] = False
    """Whether this choice means that the group is not used (`none`, `plain`). Labels and folders leave it out."""
    needs_draft: ClassVar[bool] = False
    """Whether the component cannot work without a draft."""
    takes_draft: ClassVar[bool] = False
    """Whether the component uses a draft where one is configured."""

    def check(self, config: Settings) -> None:  # noqa: B027 - a hook: most components have no such condition
        """Checks conditions that span fields or components. Raises UserError."""

    def resolved(self, config: Settings) -> Self:
        """The component with automatic values, such as null or auto, replaced by their actual values."""
        return self

    def canonical(self, config: Settings) -> dict[str, object]:
        """Values that replace the component's own in the identity: effective values, and None for a field without effect."""
        return {}

    def fingerprint(self) -> str | None:
        """A hash of the content that the component reads, as part of the identity; None without such content."""
        return None
