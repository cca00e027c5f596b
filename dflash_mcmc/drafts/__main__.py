"""`python -m dflash_mcmc.drafts check model=... draft=... dataset=...`: whether a draft accepts what it should.

`drafts speed` says whether speculation pays on this machine.
"""

import json
from pathlib import Path
from typing import Any

from dflash_mcmc.config.command import options_of, single_job
from dflash_mcmc.config.identity import plain
from dflash_mcmc.config.schema import Config
from dflash_mcmc.decoder import SpeculativeDecoder
from dflash_mcmc.errors import ConfigError, UserError, note, writing
from dflash_mcmc.process import program
from dflash_mcmc.store.files import write_atomically

_FIXED = ("sampler=greedy", "decoder=speculative_match", "tracker=none")
_GIVEN = ("model", "draft", "dataset", "hardware", "seed", "paths")
"""Groups and fields of a run that a check has too."""
_LIMITS = {"check": (32, 128), "speed": (4, 64)}
"""Problems, and tokens of an answer, where none are given."""
_HELP = """\
check: measures the acceptance of a draft by temperature and position, and finds rows off by one and wrong layers.
speed: times blocks and plain steps, and says whether speculation pays on this machine, and with how many drafted tokens.

    python -m dflash_mcmc.drafts check model=tiny draft=tiny dataset=arith
    python -m dflash_mcmc.drafts speed model=tiny draft=tiny dataset=arith hardware.num_slots=1

Arguments of `python -m dflash_mcmc` choose model, draft, dataset and hardware, and with speed the decoder. Without
dataset.limit the first 32 problems are taken (speed: 4), and without dataset.max_new_tokens at most 128 tokens of an answer
(64). With check the draft is a DFlash, DSpark or DFlash 2 checkpoint. Output: tables, and check.json or speed.json:

  --out FOLDER           default: OUTPUTS/drafts/MODEL-DRAFT, the names of their folders
"""


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if not arguments or not {"-h", "--help"}.isdisjoint(arguments):
        print(_HELP)
        return
    if (command := arguments[0]) not in _LIMITS:
        raise UserError(f"COMMAND: given {command!r}; allowed: {', '.join(_LIMITS)}")
    parser = program.OneLineParser("python -m dflash_mcmc.drafts", add_help=False)
    parser.add_argument("--out", type=Path)
    options, overrides = options_of(parser, arguments[1:])
    config, names = configured(overrides, command)
    folder = options.out or default_folder(config, names)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: given {str(folder)!r}, a file; allowed: a folder")
    from dflash_mcmc.drafts.check import check, measure, shown_paces

    values: object
    if command == "check":
        note(f"problems: {config.dataset.num_chosen()}; answers of at most {config.dataset.max_new_tokens} tokens")
        checked = check(config)
        text, values = checked.text(), checked.values()
    else:
        paces = measure(config)
        text, values = shown_paces(paces), [pace._asdict() for pace in paces]
    print(text)
    with writing(path := folder / f"{command}.json"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, indent=1) + "\n")
    print(f"\nwritten to {folder}")


def default_folder(config: Config, names: dict[str, str]) -> Path:
    """The folder of MODEL-DRAFT: the last parts of their paths, or the option of one that has no path."""
    values: dict[str, Any] = plain(config)
    parts = [Path(values[group].get("path") or names[group]).name for group in ("model", "draft")]
    return Path(config.paths.outputs) / "drafts" / "-".join(parts)


def configured(overrides: list[str], command: str = "check") -> tuple[Config, dict[str, str]]:
    """The checked configuration of overrides, and the chosen option of each group. Raises UserError."""
    limit, tokens = _LIMITS[command]
    if "decoder=plain" in overrides:
        raise ConfigError("decoder", "plain", "speculative_match, speculative_rejection (plain steps are timed beside)")

    def added(names: set[str]) -> list[str]:
        return [*_FIXED, *([f"dataset.limit={limit}"] if names.isdisjoint({"dataset.limit", "dataset.ids"}) else []),
                *([f"dataset.max_new_tokens={tokens}"] if "dataset.max_new_tokens" not in names else [])]

    given = _GIVEN if command == "check" else (*_GIVEN, "decoder")
    job = single_job(f"drafts {command}", overrides, given, added)
    if isinstance(decoder := job.config.decoder, SpeculativeDecoder) and decoder.trace:
        raise ConfigError("decoder.trace", True, "false with drafts speed, which traces one turn and times others without")
    return job.config, dict(job.choices)


if __name__ == "__main__":
    main()
