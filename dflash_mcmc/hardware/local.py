"""This machine: a device and a batch of chains for each process."""

import os
from dataclasses import dataclass
from typing import Literal

from dflash_mcmc.components import Settings, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.hardware import Hardware
from dflash_mcmc.process import ranks

_threads: dict[str, int] = {}
"""The number of threads that this module has `set` in PyTorch, and that `before` it."""


@register("hardware", "local")
@dataclass(slots=True, kw_only=True)
class Local(Hardware):
    """One device of this machine for each process of the run."""

    device: str = runtime("auto", "auto takes the first GPU, or the CPU without a GPU; cpu, cuda, cuda:1")
    num_slots: int | None = runtime(32, "draws in the batch at once; null takes as many as the memory holds, at most 256",
                                    ge=1, le=65_536)
    memory_gb: float | None = runtime(None, "memory besides the model's weights (KV cache, activations), in GB; null takes 90 "
                                      "% of the free memory", gt=0)
    prefill_chunk: int = runtime(64, "longest chunk of a prompt in a prefill step, a power of two", ge=8, le=8192)
    attention: Literal["auto", "grouped", "sdpa", "eager"] = runtime(
        "auto", "implementation of attention; auto = grouped on a CPU, this package's kernel on a GPU")
    steps_between_checks: int | None = runtime(None, "decode steps between checks for ended chains; null takes 1 on a CPU, 4 "
                                               "on a GPU", ge=1, le=64)
    snapshot_every: int = runtime(256, "positions between two kept states of recurrent layers (Qwen3-Next, Qwen3.5): fewer "
                                  "take less memory, and a rollback recomputes at most so many", ge=1)
    tokens_per_second: float | None = runtime(None, "token-forwards per second, used only for the hours of a plan; null takes "
                                              "the rate of the newest run of the model that this machine has finished", gt=0)
    num_threads: int | None = runtime(None, "threads of the CPU's arithmetic; null shares the cores among the processes of a "
                                      "launch, and takes one for the embedded model and others as small", ge=1, le=4096)

    grace_seconds: float = runtime(20.0, "time to finish running chains after the process is asked to end (SIGTERM, SIGUSR1, "
                                   "SIGUSR2), in seconds; at most 20 after a SIGTERM, because a kill follows", ge=0)

    def check(self, config: Settings) -> None:
        """Checks the chunk length and the device's name. Raises ConfigError."""
        if self.prefill_chunk & (self.prefill_chunk - 1):
            raise ConfigError("hardware.prefill_chunk", self.prefill_chunk, "a power of two from 8 to 8192")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.removeprefix("cuda:").isdecimal():
            raise ConfigError("hardware.device", self.device, "auto, cpu, cuda, cuda:0, cuda:1, ...")

    def resolve(self) -> str:
        self.set_threads()
        return self.found()

    def set_threads(self, small: bool = False) -> None:
        """Sets the threads of the CPU's arithmetic. What the user has set stays: `OMP_NUM_THREADS`, and a number in PyTorch.

        Args:
            small: the products are so short that threads would wait for one another more than they compute. Beside other
                programs they wait many times longer (notebook, "Threads of a small model").
        """
        import torch

        processes, own = ranks.local_world_size(), torch.get_num_threads()
        if own == _threads.get("set"):
            own = _threads["before"]
        _threads["before"] = own
        if processes > 1:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
            own = max(1, cores // processes)
        elif small and "OMP_NUM_THREADS" not in os.environ:
            own = 1
        _threads["set"] = self.num_threads or own
        torch.set_num_threads(_threads["set"])

    def found(self) -> str:
        import torch

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":  # each process of a launch takes a GPU of its own
            device = f"cuda:{ranks.local_rank()}"
        if device.startswith("cuda"):
            count = torch.cuda.device_count()
            if int(device.partition(":")[2] or 0) >= count:
                allowed = f"or one of the {count} GPUs that PyTorch finds here" if count else "since PyTorch finds no GPU here"
                raise ConfigError("hardware.device", self.device, f"cpu, {allowed}")
        return device
