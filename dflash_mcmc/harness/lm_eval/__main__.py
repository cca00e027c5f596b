"""`python -m dflash_mcmc.harness.lm_eval ARGUMENTS...`: the command line of lm_eval, with `--model dflash_mcmc`."""

from __future__ import annotations

import importlib.util
import sys

from dflash_mcmc.errors import UserError
from dflash_mcmc.harness.lm_eval.requests import without_cache
from dflash_mcmc.process import program


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm_eval: is not installed; allowed: pip install -e '.[lm-eval]'")
    import lm_eval.models  # noqa: F401 - registers its own models, which lm_eval does only while none is registered
    from lm_eval.__main__ import cli_evaluate

    import dflash_mcmc.harness.lm_eval.model  # noqa: F401 - the import registers the model

    sys.argv = ["lm_eval", *without_cache(arguments)]
    cli_evaluate()


if __name__ == "__main__":
    main()
