"""Measures the engine's speed and memory. The results are printed as tables and written to bench.json.

    python -m tests.bench                               the parts that need no GPU (at most half an hour on two cores)
    python -m tests.bench subjects=[tiny] parts=[c,f]   two parts, for the embedded model
"""

import dataclasses
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from dflash_mcmc.components import MISSING, runtime
from dflash_mcmc.config import command, help
from dflash_mcmc.config.help import is_asked_for
from dflash_mcmc.config.schema import Paths
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.process import program
from dflash_mcmc.process.machine import cpu_model
from dflash_mcmc.store.files import write_atomically

_SUBJECTS = ("tiny", "mid", "smollm2", "smollm2_bfloat16")
_PARTS = ("c", "f", "g", "h", "i", "o")
_WITH_DRAFT = ("h", "i")


@dataclass(slots=True, kw_only=True)
class Bench:
    """The configuration of a benchmark: `conf/bench.yaml`."""

    subjects: list[str] = runtime(["tiny", "mid"], "models to measure: tiny (embedded), mid (random, 107 M parameters), "
                                  "smollm2 and smollm2_bfloat16 (after make smollm2)")
    parts: list[str] = runtime(["c", "f", "g", "h", "i", "o"], "parts to run: c overhead, f memory, g growth, h decoders, "
                               "i chains by decoder, o chains of equal length against generate")
    tiny_slots: int = runtime(256, "number of slots for the embedded model", ge=1)
    mid_slots: int = runtime(64, "number of slots for the mid-size model", ge=1)
    waves: int = runtime(4, "number of chains per slot", ge=1)
    mid_horizon: int = runtime(64, "number of new tokens of the models other than the embedded one", ge=16)
    decoder_slots: list[int] = runtime([1, 4, 16], "numbers of slots in parts h and i")
    decoder_chains: int = runtime(16, "number of chains in part h with one slot; part i uses half", ge=1)
    draft_path: str = runtime(MISSING, "folder of the embedded model's draft for parts h and i")
    smollm2_draft: str | None = runtime(MISSING, "folder of a draft for smollm2; null measures what needs no draft")
    paths: Paths = dataclasses.field(default_factory=Paths)

    def check(self) -> None:
        """Raises ConfigError for an unknown subject or part, a bad number of slots, or a missing draft."""
        for field, given, known in (("subjects", self.subjects, _SUBJECTS), ("parts", self.parts, _PARTS)):
            if not given or set(given) - set(known):
                raise ConfigError(field, given, f"some of {', '.join(known)}")
        if not self.decoder_slots or min(self.decoder_slots) < 1:
            raise ConfigError("decoder_slots", self.decoder_slots, "whole numbers >= 1")
        if "tiny" in self.subjects and set(self.parts) & set(_WITH_DRAFT) and not Path(self.draft_path).is_dir():
            raise ConfigError("draft_path", self.draft_path, "the folder of a DFlash checkpoint for the embedded model")


def bench(plan: Bench) -> Path:
    """Runs the parts, prints the table of each part when it is finished, and returns the path of the JSON file."""
    import torch

    from tests.bench.measure import Sizes
    from tests.bench.parts import PARTS
    from tests.bench.subject import subject_of

    machine = {"processor": cpu_model() or platform.processor(), "cores": torch.get_num_threads(),
               "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    report = {"machine": machine, "plan": dataclasses.asdict(plan), "results": {}}
    path = Path(plan.paths.outputs) / "bench.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    for name in plan.subjects:
        draft = plan.draft_path if name == "tiny" else plan.smollm2_draft
        subject = subject_of(name, plan.mid_horizon, draft, plan.paths.outputs)
        slots = plan.tiny_slots if name == "tiny" else plan.mid_slots
        sizes = Sizes(slots, plan.waves, plan.decoder_slots, plan.decoder_chains)
        for part in plan.parts:
            started = time.perf_counter()
            rows = PARTS[part](subject, sizes)
            title = (PARTS[part].__doc__ or "").partition("\n")[0]
            lines = table(rows) if rows else "skipped: this model has no draft, or no folder"
            print(f"\n{name}: {title} [{time.perf_counter() - started:.0f} s]\n{lines}", flush=True)
            report["results"].setdefault(name, {})[part] = rows
            write_atomically(path, json.dumps(report, indent=1) + "\n")
    return path


def table(rows: list[dict]) -> str:
    """Rows as a table. Numbers have three significant digits."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    align = ["left"] + ["right"] * (len(keys) - 1)
    return tabulate(cells, headers=keys, tablefmt="github", disable_numparse=True, colalign=align)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if is_asked_for(arguments):
        print(help.usage_of(__doc__, {"Fields": Bench}))
        return
    plan, _ = command.compose_once("bench", arguments, Bench)
    plan.check()
    print(f"\nwritten to {bench(plan)}")


if __name__ == "__main__":
    main()
