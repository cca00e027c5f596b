"""Trains the embedded target or a DFlash draft. The same command resumes a training that was stopped.

    python -m dflash_mcmc.train model=tiny                                      the embedded target
    python -m dflash_mcmc.train draft=tiny                                      a draft for the embedded target
    python -m dflash_mcmc.train draft=dflash model=qwen3_4b prompts.path=FILE   a draft for any target; draft=eagle3 is EAGLE-3
"""

from __future__ import annotations

from dflash_mcmc.config import command
from dflash_mcmc.config.help import is_asked_for
from dflash_mcmc.process import program, ranks


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if is_asked_for(arguments):
        print(_help())
        return
    names = [text.removeprefix("draft=") for text in arguments if text.startswith("draft=")]
    if names:
        _train_draft(names[-1], [text for text in arguments if not text.startswith("draft=")])
    else:
        _train_target(arguments)


def _help() -> str:
    from dflash_mcmc.config import help
    from dflash_mcmc.train.recipe import DraftPlan
    from dflash_mcmc.train.target import TrainingPlan

    described = f"{__doc__}\nOptions of the groups model, hardware and tracker: python -m dflash_mcmc.catalogue GROUP"
    return help.usage_of(described, {"Fields with model=tiny": TrainingPlan,
                                  "Fields with draft=tiny, smollm2 or dflash": DraftPlan})


def _train_target(overrides: list[str]) -> None:
    from dflash_mcmc.train import target

    plan, choices = command.compose_once("train", overrides, target.TrainingPlan)
    plan.check(choices["model"])
    print(f"model written to {target.train(plan)}")


def _train_draft(name: str, overrides: list[str]) -> None:
    from dflash_mcmc.train import draft, recipe

    folder = draft.train(recipe.compose(name, overrides))
    if not ranks.rank():
        print(f"draft written to {folder}")


if __name__ == "__main__":
    main()
