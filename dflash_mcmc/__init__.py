"""Experiments on how to sample from a language model at inference time: exact, batched, resumable.

    import dflash_mcmc as dm
    samples = dm.sample(model, tokenizer, ["What is 7*6?"], sampler=dm.PowerMH(alpha=4))

The names of `dflash_mcmc.api` and the classes of all components are attributes of the package. What one of them needs is
imported when it is used. `__init__.pyi` lists them for editors and type checkers.
"""

__version__ = "1.1.0"
__all__ = ["ConfigError", "Engine", "Sample", "UserError", "compare", "component", "grade", "read", "run", "sample", "sweep",
           "write_report"]

import importlib
import os
from typing import Any

from dflash_mcmc.process import machine

_PLACES = {"ConfigError": "errors", "UserError": "errors", "Engine": "api"}
"""Modules of the names in `__all__` that are neither in `api` under their own name nor a package."""

if os.name == "nt":
    raise ImportError("dflash_mcmc needs Linux or macOS; on Windows it runs in WSL: wsl --install")
machine.keep_bits()
machine.spin_briefly()


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"dflash_mcmc.{_PLACES.get(name, 'api')}")
        return getattr(module, "LoadedEngine" if name == "Engine" else name)
    if name[0].isupper():  # no module has such a name, so that an import of a module never loads the components
        from dflash_mcmc.components import classes
        from dflash_mcmc.errors import did_you_mean

        if (component := classes().get(name)) is not None:
            return component
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __dir__())}")
    meant = "".join(f" (did you mean {each!r}?)" for each in __all__ if each.endswith(f"_{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    from dflash_mcmc.components import classes

    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *classes()})
