"""`python -m dflash_mcmc.verify TARGET ...`: whether an engine draws tokens from the law that it states."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.components import name_of
from dflash_mcmc.config.command import check_command, options_of, single_job
from dflash_mcmc.config.identity import configuration_of, node_of
from dflash_mcmc.config.schema import Config
from dflash_mcmc.errors import ConfigError, UserError, note, reason_of
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process import bars, program
from dflash_mcmc.store.records import identity_if_readable
from dflash_mcmc.verify import drawn

if TYPE_CHECKING:
    from dflash_mcmc.verify import audit, behaviour

RED = 1
"""The exit code of an audit that finds another law."""
_GIVEN = ("model", "dataset", "sampler", "blend", "hardware", "num_chains", "seed", "paths")
_OF_A_RUN = ("model", "blend", "sampler")
_HELP = """\
Audits what an engine drew: do the tokens follow the law that it states? TARGET is one of

  outputs/NAME/RUN          a run folder of this package
  texts.jsonl               texts of any engine: prompt_ids or prompt, and ids or text, in each line
  cases FOLDER              none yet: writes a small model and prompts that any engine can be run on
  http://HOST:PORT/v1       a server, which is asked for the texts of dataset=..., num_chains of each problem

    python -m dflash_mcmc.verify texts.jsonl model=tiny sampler.temperature=0.8 sampler.top_p=0.95

For texts of other engines, model=... is the checkpoint that the engine claims to run, and the fields of
sampler=temperature (or sampler=greedy) state the law: temperature 1 without truncation unless given. Any other law is a
function of yours, sampler.function=FILE:FUNCTION. Output: the verdict, what explains it, and report.html and verify.json in
the folder. Exit code: 0 green, 1 red, 2 a mistake in the command.

  --level LEVEL     the probability of a false alarm that is allowed, whenever one looks; default 0.001
  --out FOLDER      default: OUTPUTS/verify/NAME
  --against OTHER   how often, where and by how much the texts part from a run folder or a file that should have the same
  --concurrency N,N for a server: the same texts at each number of requests at once, such as 1,8,64, with clients that leave;
                    law, seeds and log p by number
  --bits            for --concurrency: the server promises the same text for a seed at every number
"""


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if not arguments or not {"-h", "--help"}.isdisjoint(arguments):
        print(_HELP)
        return
    if arguments[0] == "cases":
        if len(arguments) != 2:
            raise UserError(f"cases: given {' '.join(arguments[1:]) or 'nothing'!r}; allowed: one folder to write to")
        drawn.write_cases(_stated(["model=tiny", "dataset=arith"]), Path(arguments[1]))
        print(f"written to {arguments[1]}: draw the answers of each NAME.jsonl with target/, and audit them with model=target")
        return
    parser = program.OneLineParser("python -m dflash_mcmc.verify", add_help=False)
    parser.add_argument("target")
    parser.add_argument("--level", type=float, default=1e-3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--concurrency")
    parser.add_argument("--bits", action="store_true")
    given, overrides = options_of(parser, arguments)
    if not 0.0 < given.level < 1.0:
        raise UserError(f"--level: given {given.level:g}; allowed: a probability between 0 and 1")
    is_server = given.target.startswith(("http://", "https://"))
    path = Path(given.target)
    if not is_server and not path.exists():
        raise UserError(f"TARGET: given {given.target!r}, which does not exist; allowed: a run folder, a JSON Lines file, or "
                        "the address of a server")
    config = _of_run(path, overrides) if path.is_dir() else _stated(overrides)
    law = _token_law(config) or SamplingParams()
    if is_server and law.function is not None:
        raise UserError("sampler.function: given with a server, which cannot be asked for it; allowed: with a file of "
                        "texts, or a run that was drawn so")
    if (given.concurrency or given.bits) and (not is_server or not given.concurrency or given.against):
        raise UserError(f"--{'concurrency' if given.concurrency else 'bits'}: given without a server"
                        f"{' and --concurrency' * (not given.concurrency)}, or with --against; allowed: for a server")
    name = given.target.split("//")[-1].replace("/", "-").replace(":", "-") if is_server else path.resolve().name
    folder = given.out or Path(config.paths.outputs) / "verify" / name
    server = given.target.rstrip("/") if is_server else None
    found, besides = _audited(folder / "drawn.jsonl" if server else path, config, given, server)
    from dflash_mcmc.verify import report

    more = [report.of_findings(besides)] if besides else []
    files = config.model.files()
    stated = f" The law is the function {law.function_name}." if law.function else ""
    report.write(found, folder, f"What {given.target} has drawn, against model {files.folder if files else ''}.{stated}", more)
    print(report.text(found, more))
    print(f"\nwritten to {folder}")
    if found.is_red or report.broken(more):
        sys.exit(RED)


def _audited(path: Path, config: Config, given: Namespace,
             server: str | None) -> "tuple[audit.Audit, list[behaviour.Finding]]":
    note("reading the model")
    from dflash_mcmc.verify import audit, behaviour

    numbers = []
    if given.concurrency:
        number_of_texts = len(config.dataset.problems()) * config.num_chains
        with suppress(ValueError):
            numbers = [int(each) for each in given.concurrency.split(",")]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1 or numbers[-1] > number_of_texts:
            raise UserError(f"--concurrency: given {given.concurrency}; allowed: rising numbers of requests at once, such as "
                            f"1,8,64, up to {number_of_texts}, the texts (dataset.limit and num_chains)")
    model, law = config.model.load(config.hardware.resolve()), _token_law(config)
    read, found = law or SamplingParams(), list[behaviour.Finding]()

    def of(source: Path) -> tuple[list[drawn.DrawnText], int]:
        return drawn.of_run(source, model, config.model.chat) if source.is_dir() else (
            list(drawn.of_file(source, model, read)), 0)

    def counted(bar: bars.Bar) -> Iterator[drawn.DrawnText]:
        for text in texts:
            yield text
            bar.update(tokens=len(text.tokens))

    if server is not None:
        asked = drawn.connected(server)
        answers = behaviour.ask(asked, config, model, read, path.with_name("behaviour.jsonl"))
        found += behaviour.judge(model, answers, read, given.level, config.blend)
        if numbers:
            audited, of_load = behaviour.under_load(asked, config, model, read, given.level, path, numbers, given.bits,
                                                    found[-1].says.startswith("processed"))
            return audited._replace(defaults=_defaults(config, read)), [*of_load, *found]
        texts, left_out = drawn.draw(asked, config, model, read, path), 0
    else:
        texts, left_out = of(path)
    if given.against is not None:
        others, is_greedy = of(given.against)[0], read.temperature == 0.0
        found.append(behaviour.against(model, given.against, texts, others, is_greedy, config.blend))
    with bars.Bar(len(texts), "text", "auditing") as bar:
        audited = audit.audit(model, counted(bar), law, given.level, config.blend)._replace(
            left_out=left_out, defaults=_defaults(config, read))
    return audited, found


def _defaults(config: Config, law: SamplingParams) -> str:
    """The steps that generation_config.json sets and the law lacks. An engine applies them where a request is silent."""
    files = config.model.files()
    path = files.folder / "generation_config.json" if files else None
    if path is None or not path.is_file():
        return ""
    values = json.loads(path.read_text())
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    silent = " ".join(f"sampler.{name}={values[name]:g}" for name in names
                      if isinstance(values.get(name), (int, float)) and values[name] != getattr(law, name))
    return (f"{path} sets other values than the stated law: transformers, vLLM and SGLang apply them where a request is "
            f"silent. If the texts were drawn so, state {silent}.") if silent else ""


def _stated(overrides: list[str]) -> Config:
    def added(names: set[str]) -> list[str]:
        fixed = ["tracker=none", *(["sampler=temperature"] if "sampler" not in names else [])]
        if "sampler=temperature" in (*fixed, *overrides) and names.isdisjoint(
                {"sampler.temperature", "sampler.alpha", "sampler.function"}):
            fixed.append("sampler.temperature=1.0")  # the sampler's own is 1/alpha
        return fixed

    config = single_job("verify", overrides, _GIVEN, added).config
    if config.dataset.must_end:
        raise ConfigError("dataset.must_end", True, "false: answers that are drawn until one ends have no law of a token")
    if _token_law(config) is None:
        raise ConfigError("sampler", name_of(config.sampler), "temperature or greedy: the law of each token")
    return config


def _token_law(config: Config) -> SamplingParams | None:
    """The law of each token; None for a chain's sampler, and for answers that are drawn until one ends: tokens have none."""
    in_order = config.sampler.draws_once or config.sampler.is_deterministic
    return config.sampler.law() if in_order and not config.dataset.must_end else None


def _of_run(folder: Path, overrides: list[str]) -> Config:
    if overrides:
        raise UserError(f"{overrides[0]}: given with a run folder; allowed: nothing, since its config.yaml states the law")
    from omegaconf import OmegaConf, errors

    config, values = check_command(["tracker=none"]).jobs[0].config, configuration_of(folder)
    try:
        for group in _OF_A_RUN:  # the law of a token; other groups may have fields that this version does not know
            setattr(config, group, OmegaConf.to_object(node_of(group, values[group])))
        config.dataset.must_end = values["dataset"].get("must_end", False)
        config.paths.outputs = values["paths"]["outputs"]
    except (ValueError, LookupError, TypeError, AttributeError, errors.OmegaConfBaseException) as error:
        raise UserError(f"{folder / 'config.yaml'}: cannot be read: {reason_of(error)}; allowed: the file as the run wrote "
                        "it, or a JSON Lines file of texts") from error
    drawn_by = identity_if_readable(folder).get("sampler.content")
    if drawn_by is not None and config.sampler.fingerprint() != drawn_by:
        raise ConfigError("sampler.function", values["sampler"].get("function"), f"what {folder} was drawn with; the content "
                          "of the file is another one now")
    config.model.check(config)
    return config


if __name__ == "__main__":
    main()
