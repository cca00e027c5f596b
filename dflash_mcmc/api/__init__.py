"""The framework from Python. `import dflash_mcmc as dm` has every name of this page, and the class of every component.

- `dm.sample` draws from a model; `dm.Engine` (here `LoadedEngine`) keeps it loaded, and gives samples as they end.
- `dm.run` makes a run as the command line does; `dm.read` and `dm.compare` read run folders.
- `dm.PowerMH(alpha=4)` is a component with its defaults; `dm.component` takes the name of an option instead.
"""

from dflash_mcmc.api.choices import component
from dflash_mcmc.api.prompts import Prompt, Prompts
from dflash_mcmc.api.runs import compare, read, run
from dflash_mcmc.api.sampling import LoadedEngine, Sample, sample

__all__ = ["LoadedEngine", "Prompt", "Prompts", "Sample", "compare", "component", "read", "run", "sample"]
