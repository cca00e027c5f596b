"""`python -m dflash_mcmc.drafts check model=... draft=... dataset=...`: whether a draft accepts what it should, or why not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dflash_mcmc.config.single import options_of, single_job
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.process import program

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.model.hf import HFModel

_FIXED = ("sampler=greedy", "decoder=speculative_match", "decoder.trace=true", "tracker=none")
_GIVEN = ("model", "draft", "dataset", "hardware", "seed", "paths")
"""Groups and fields of a run that a check has too."""
_LIMIT, _TOKENS = 32, 128
_HELP = f"""\
Measures the acceptance of a draft, tries the known mistakes one after another, and names the likely cause.

    python -m dflash_mcmc.drafts check model=tiny draft=tiny dataset=arith

Arguments of `python -m dflash_mcmc` choose model, draft, dataset and hardware. Without dataset.limit the first {_LIMIT}
problems are taken, and without dataset.max_new_tokens at most {_TOKENS} tokens of an answer. The draft is a DFlash, DSpark or
DFlash 2 checkpoint. Output: tables, and check.json, check.png and check.svg in the folder.

  --expected TAU         tokens for each forward of the target at temperature 0 that the draft should have; default:
                         training.held_out_tau in the draft's config.json, if it is there
  --trained-for MODEL    another checkpoint, whose embedding and head are tried
  --out FOLDER           default: OUTPUTS/drafts/MODEL-DRAFT
"""


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if not arguments or not {"-h", "--help"}.isdisjoint(arguments):
        print(_HELP)
        return
    if arguments[0] != "check":
        raise UserError(f"COMMAND: given {arguments[0]!r}; allowed: check")
    parser = program.OneLineParser("python -m dflash_mcmc.drafts", add_help=False)
    parser.add_argument("--expected", type=float)
    parser.add_argument("--trained-for")
    parser.add_argument("--out", type=Path)
    options, overrides = options_of(parser, arguments[1:])
    if options.expected is not None and not options.expected >= 1.0:
        raise UserError(f"--expected: given {options.expected:g}; allowed: a number >= 1, tokens for each forward")
    config, names = configured(overrides)
    folder = options.out or Path(config.paths.outputs) / "drafts" / f"{names['model']}-{names['draft']}"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: given {str(folder)!r}, a file; allowed: a folder")
    other = None if options.trained_for is None else _other(config, options.trained_for)
    from dflash_mcmc.draft.check import report
    from dflash_mcmc.draft.check.check import check

    note(f"problems: {config.dataset.num_chosen()}; answers of at most {config.dataset.max_new_tokens} tokens")
    checked = check(config, options.expected, other)
    print(report.text(checked))
    report.write(checked, folder)
    print(f"\nwritten to {folder}")


def configured(overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The checked configuration of overrides, and the chosen option of each group. Raises UserError."""
    def added(names: set[str]) -> list[str]:
        return [*_FIXED, *([f"dataset.limit={_LIMIT}"] if names.isdisjoint({"dataset.limit", "dataset.ids"}) else []),
                *([f"dataset.max_new_tokens={_TOKENS}"] if "dataset.max_new_tokens" not in names else [])]

    job = single_job("drafts check", overrides, _GIVEN, added)
    return job.config, dict(job.choices)


def _other(config: Config, path: str) -> HFModel:
    """Another model with the configuration's fields. Raises UserError."""
    other = dataclasses.replace(cast("HFModel", config.model), path=path, revision=None)
    other.check(config)
    return other


if __name__ == "__main__":
    main()
