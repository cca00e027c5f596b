"""The fields of `hydra/launcher=slurm`: the resources of a grid's jobs, and how they handle time limits and failures."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mcmc.components import runtime, schema_of, specs_of, types_of
from dflash_mcmc.config.schema import to_typed
from dflash_mcmc.errors import ConfigError, UserError

PREFIX = "hydra.launcher."
MOST_JOBS = 1000
_GROUP = "engine.tensor_parallel_size * engine.pipeline_parallel_size"


@dataclass(slots=True, kw_only=True)
class Slurm:
    """The jobs of a grid on SLURM: one for each shard of each point. Each job has one node."""

    partition: str | None = runtime(None, "partition, or several separated by commas; null = the cluster's default")
    account: str | None = runtime(None, "account that is charged; null = your default account")
    qos: str | None = runtime(None, "quality of service; null = your default")
    gpus: int = runtime(0, "GPUs of a job", ge=0, le=64)
    cpus: int = runtime(4, "CPU cores of a job", ge=1, le=1024)
    memory_gb: float | None = runtime(None, "memory of a job, in GB; null = the cluster's default", gt=0)
    minutes: int = runtime(60, "time limit of a job; shortly before it, the job is requeued and continues later", ge=1)
    array_parallelism: int = runtime(64, "largest number of the grid's jobs that run at once", ge=1)
    shards: int = runtime(1, "jobs that share each point, at most one for each pending sample", ge=1, le=10_000)
    processes: int | None = runtime(None, "processes of a job, started by accelerate if there are several; null = one for "
                                    "each GPU, or each group of GPUs that engine=vllm shares a model among", ge=1, le=64)
    grace_seconds: int = runtime(120, "time before the time limit in which started samples are finished or given up and the "
                                 "job is requeued; at most half of the limit", ge=5, le=3600)
    max_requeues: int = runtime(20, "how often a job is requeued, at time limits and preemptions", ge=0)
    max_restarts: int = runtime(5, "how often a worker process that dies without a new record is restarted in its job", ge=0)
    setup: list[str] = runtime([], "shell lines before Python starts: modules, a virtual environment")
    python: str | None = runtime(None, "command that starts Python in a job, such as `apptainer exec image.sif python`; null "
                                 "= the interpreter of the submission")
    confirm: bool = runtime(False, f"allow the submission of more than {MOST_JOBS:,} jobs")

    @property
    def num_processes(self) -> int:
        """Processes of a job."""
        return self.processes or max(1, self.gpus)

    def asked(self) -> str:
        """The fields that a cluster may refuse, as they are written on a command line. Fields that are null are left out."""
        names = ("partition", "account", "qos", "gpus", "cpus", "memory_gb", "minutes")
        values = {name: getattr(self, name) for name in names}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    def with_groups(self, num_devices: int) -> "Slurm":
        """The fields where each process uses so many GPUs together. Raises ConfigError if the job has too few of them."""
        if not self.gpus or num_devices == 1:
            return self
        groups = self.gpus // num_devices
        if not groups:
            raise ConfigError(f"{PREFIX}gpus", self.gpus, f"at least {num_devices}, {_GROUP}")
        if self.processes is not None and self.processes > groups:
            raise ConfigError(f"{PREFIX}processes", self.processes, f"at most {groups} with gpus={self.gpus} and "
                              f"{num_devices} GPUs for each, {_GROUP}")
        return dataclasses.replace(self, processes=self.processes or groups)

    def check(self) -> None:
        """Raises ConfigError for what no single field can tell."""
        if 2 * self.grace_seconds > 60 * self.minutes:
            raise ConfigError(f"{PREFIX}grace_seconds", self.grace_seconds,
                              f"at most half of the time limit, {30 * self.minutes} with minutes={self.minutes}")
        if self.gpus and self.num_processes > self.gpus:
            raise ConfigError(f"{PREFIX}processes", self.processes,
                              f"at most one for each GPU, {self.gpus} with gpus={self.gpus}")
        for name in ("partition", "account", "qos", "python"):
            value = getattr(self, name)
            if value is not None and (not value.strip() or "\n" in value):
                raise ConfigError(f"{PREFIX}{name}", value, "a text of one line, or null")


@cache
def store_fields() -> None:
    """Registers the fields with Hydra, once."""
    ConfigStore.instance().store(group="schema/launcher", name="slurm", node=schema_of(Slurm), provider="dflash_mcmc")


def to_launcher(node: DictConfig) -> Slurm:
    """The checked fields of a composed `hydra.launcher`. Raises UserError."""
    launcher = to_typed(node, Slurm, PREFIX)
    launcher.check()
    return launcher


def changed(launcher: Slurm, overrides: Sequence[str]) -> Slurm:
    """The launcher with some fields changed, such as `minutes=240`. Raises UserError."""
    specs, node = specs_of(Slurm), OmegaConf.structured(launcher)
    for text in overrides:
        name, equals, value = text.removeprefix(PREFIX).partition("=")
        if not equals or name not in specs:
            raise UserError(f"cannot read {text!r}; allowed: field=value with a field of hydra/launcher=slurm: "
                            f"{', '.join(specs)}")
        try:
            node = OmegaConf.merge(node, OmegaConf.from_dotlist([f"{name}={value}"]))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{PREFIX}{name}", value, specs[name].describe(types_of(Slurm)[name])) from error
    return to_launcher(node)


def expand(arguments: Sequence[str]) -> list[str]:
    """A command line with full names for the launcher's fields: `shards=8` becomes `hydra.launcher.shards=8`."""
    return [PREFIX + text if text.partition("=")[0] in specs_of(Slurm) and "=" in text else text for text in arguments]
