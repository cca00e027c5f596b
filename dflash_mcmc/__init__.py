"""Experiments on how to sample from a language model at inference time: exact, batched, resumable.

`sample`, `component` and `Sample` come from `dflash_mcmc.api`, which is imported only when one of them is used.
"""

__version__ = "0.1.0"
__all__ = ["Sample", "component", "sample"]

from typing import TYPE_CHECKING, Any

from dflash_mcmc.process import bits

if TYPE_CHECKING:
    from dflash_mcmc.api import Sample, component, sample

bits.keep()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dflash_mcmc import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
