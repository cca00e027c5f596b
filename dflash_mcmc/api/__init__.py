"""The framework from Python. `import dflash_mcmc as dm` has every name of this page, and the class of every component.

- `dm.sample` draws from a model; `dm.Engine` (here `LoadedEngine`) keeps it loaded, and gives samples as they end.
- `dm.run` and `dm.sweep` make runs as the command line does; `dm.read`, `dm.compare` and `dm.write_report` read run folders.
- `dm.grade` grades samples and texts.
- `dm.PowerMH(alpha=4)` is a component with its defaults; `dm.component` takes the name of an option instead.
"""

from dflash_mcmc.api.choices import component
from dflash_mcmc.api.prompts import Prompt, Prompts
from dflash_mcmc.api.runs import compare, grade, read, run, sweep, write_report
from dflash_mcmc.api.sampling import LoadedEngine, Sample, sample

__all__ = ["LoadedEngine", "Prompt", "Prompts", "Sample", "compare", "component", "grade", "read", "run", "sample", "sweep",
           "write_report"]
