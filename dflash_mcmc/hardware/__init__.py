"""Hardware: the device of a run and the use of its memory. It never changes the outputs in float32 on a CPU."""

from abc import abstractmethod
from typing import TYPE_CHECKING

from dflash_mcmc.components import Component
from dflash_mcmc.engine.batching.interface import Options


class Hardware(Component):
    """Base class of hardware.

    A subclass defines `resolve`, and declares these fields.
    """

    __slots__ = ()

    group = "hardware"

    if TYPE_CHECKING:  # dataclass fields of the subclass
        device: str
        num_slots: int | None
        memory_gb: float | None
        prefill_chunk: int
        attention: str
        steps_between_checks: int | None
        snapshot_every: int
        tokens_per_second: float | None
        num_threads: int | None
        grace_seconds: float

    @abstractmethod
    def resolve(self) -> str:
        """The device's name for PyTorch. Sets the number of threads. Raises ConfigError for a missing device."""

    @abstractmethod
    def set_threads(self, small: bool = False) -> None:
        """Sets the threads of the CPU's arithmetic for a model, whose products may all be small."""

    @abstractmethod
    def found(self) -> str:
        """The device's name for PyTorch. Raises ConfigError for a device that this machine does not have."""

    def options(self) -> Options:
        """The options of the engine."""
        from dflash_mcmc.engine.batching.interface import Options

        return Options(self.prefill_chunk, attention=self.attention, steps_between_checks=self.steps_between_checks,
                       snapshot_every=self.snapshot_every)
