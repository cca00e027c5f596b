"""This machine: a device for each process, and a number of chains in its batch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import runtime
from dflash_mcmc.hardware import Hardware
from dflash_mcmc.process import ranks
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config


@register("hardware", "local")
@dataclass(slots=True, kw_only=True)
class Local(Hardware):
    """One device of this machine for each process of the run."""

    device: str = runtime("auto takes the first GPU, or the CPU where there is none; cpu, cuda, cuda:1")
    num_slots: int | None = runtime("chains in the batch at once; null takes as many as the memory holds, at most 256", ge=1)
    memory_gb: float | None = runtime("memory for keys, values and work beside the model's weights, in GB; null takes 90 % of "
                                      "what is free", gt=0)
    prefill_chunk: int = runtime("longest piece in which prompts are read, a power of two", ge=8, le=8192)
    read_ahead: int = runtime("prompts of waiting chains that are read at once; 0 reads each in its slot", ge=0)
    reuse_prefix: bool = runtime("keep the keys and values of what a proposal shares with the state; false reads all anew")
    keep_current: bool = runtime("keep the state's keys and values in a second cache while a proposal overwrites them; false "
                                 "reads them anew after a rejection")
    whole_blocks: bool = runtime("draw the tokens that a draft says of a block at once and read them in one forward of "
                                 "the target")
    skip_identical: bool = runtime("take the tokens that a proposal shares with the state without asking the model")
    attention: str = runtime("implementation of attention; auto = grouped on a CPU, sdpa on a GPU",
                             choices=("auto", "grouped", "sdpa", "eager", "flash_attention_2"))
    cuda_graphs: bool = runtime("replay decode steps as CUDA graphs, where there is a GPU")
    steps_between_checks: int | None = runtime("decode steps between looks at what has ended; null takes 1 on a CPU, 4 on a "
                                               "GPU", ge=1, le=64)
    tokens_per_second: float | None = runtime("token-forwards a second, for the hours of dry_run alone: of an earlier "
                                              "summary.json token_forwards / (mean_share_seconds * num_samples); null is not "
                                              "known", gt=0)
    num_threads: int | None = runtime("threads of the CPU's arithmetic; null shares the cores among the processes of a launch",
                                      ge=1)

    grace_seconds: float = runtime("what is under way gets so long to be finished when the process is asked to end (SIGTERM, "
                                   "SIGUSR1, SIGUSR2); at most 20 behind a SIGTERM, which a kill follows", ge=0)
    max_attempts: int = runtime("a sample over which the process died so often with no other under way is recorded as an "
                                "error", ge=1)

    def check(self, config: Config) -> None:
        """Raises ConfigError."""
        if self.prefill_chunk & (self.prefill_chunk - 1):
            raise ConfigError("hardware.prefill_chunk", self.prefill_chunk, "a power of two from 8 to 8192")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.removeprefix("cuda:").isdecimal():
            raise ConfigError("hardware.device", self.device, "auto, cpu, cuda, cuda:0, cuda:1, ...")

    def resolve(self) -> str:
        """The device's name for PyTorch. Sets the number of threads. Raises ConfigError where the device is not there."""
        import torch

        processes = ranks.local_world_size()
        if self.num_threads is not None or processes > 1:
            torch.set_num_threads(self.num_threads or max(1, len(os.sched_getaffinity(0)) // processes))
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{ranks.local_rank()}"
        if device.startswith("cuda"):
            count = torch.cuda.device_count()
            if int(device.partition(":")[2] or 0) >= count:
                raise ConfigError("hardware.device", self.device, f"cpu, or one of the {count} GPUs that PyTorch finds here")
        return device
