"""Trains a DFlash draft. The same command resumes a training that was stopped.

    python -m dflash_mcmc.train draft=tiny                                      a draft for the embedded target
    python -m dflash_mcmc.train draft=dflash model=qwen3_4b prompts.path=FILE   a draft for any target
"""

from dflash_mcmc.config.help import is_asked_for, usage_of
from dflash_mcmc.process import program, ranks


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    from dflash_mcmc.train import recipe

    if is_asked_for(arguments):
        described = f"{__doc__}\nOptions of the groups model, hardware and tracker: python -m dflash_mcmc --help GROUP"
        print(usage_of(described, {"Fields": recipe.DraftPlan}))
        return
    from dflash_mcmc.train import draft

    name = next((text.removeprefix("draft=") for text in reversed(arguments) if text.startswith("draft=")), "")
    folder = draft.train(recipe.compose(name, [text for text in arguments if not text.startswith("draft=")]))
    if not ranks.rank():
        print(f"draft written to {folder}")


if __name__ == "__main__":
    main()
