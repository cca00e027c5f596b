"""This machine: one device and a number of chains in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import runtime
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config import Config


@register("hardware", "local")
@dataclass(slots=True, kw_only=True)
class Local:
    """One device of this machine."""

    device: str = runtime("auto takes the first GPU, or the CPU where there is none; cpu, cuda, cuda:1")
    num_slots: int = runtime("chains in the batch at once", ge=1)
    prefill_chunk: int = runtime("longest piece in which prompts are read, a power of two", ge=8, le=8192)
    reuse_prefix: bool = runtime("keep the keys and values of what a proposal shares with the state; false reads all anew")
    num_threads: int | None = runtime("threads of the CPU's arithmetic; null takes what PyTorch finds", ge=1)

    def check(self, config: Config) -> None:
        """Raises ConfigError."""
        if self.prefill_chunk & (self.prefill_chunk - 1):
            raise ConfigError("hardware.prefill_chunk", self.prefill_chunk, "a power of two from 8 to 8192")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.removeprefix("cuda:").isdecimal():
            raise ConfigError("hardware.device", self.device, "auto, cpu, cuda, cuda:0, cuda:1, ...")

    def resolve(self) -> str:
        """The device's name for PyTorch. Sets the number of threads. Raises ConfigError where the device is not there."""
        import torch

        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda"):
            count = torch.cuda.device_count()
            if int(device.partition(":")[2] or 0) >= count:
                raise ConfigError("hardware.device", self.device, f"cpu, or one of the {count} GPUs that PyTorch finds here")
        return device
