"""One run: open the folder, find what is pending, draw, grade, record, track, summarise."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from omegaconf import OmegaConf

from dflash_mcmc import stats
from dflash_mcmc.config import PACKAGE, Config, hash_of, identity_of, plain, run_folder
from dflash_mcmc.errors import UserError
from dflash_mcmc.ranks import Team
from dflash_mcmc.rng import Key
from dflash_mcmc.store import RunStore
from dflash_mcmc.tracker import Guarded, RunInfo
from dflash_mcmc.types import ChainResult, Grade, Problem
from dflash_mcmc.types import Path as PathOfTokens

if TYPE_CHECKING:
    from tqdm import tqdm

    from dflash_mcmc.engine.batched import BatchedEngine
    from dflash_mcmc.engine.interface import Finished
    from dflash_mcmc.engine.language_model import LanguageModel

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "math-verify", "latex2sympy2_extended",
             "sympy", "matplotlib", "hydra-core", "omegaconf", "wandb", "accelerate")


class RunResult(NamedTuple):
    """A finished run."""

    folder: Path
    summary: dict
    num_new: int
    """Samples drawn by this start."""
    num_beyond: int
    """Samples of earlier starts that were not asked for now: the summary covers them too."""


class _Pending(NamedTuple):
    problem: Problem
    chain: int
    prompt: object
    """Token ids, int64."""


_runs = itertools.count()


def execute(config: Config) -> RunResult:
    """Draws what the run lacks and summarises it. A run that lacks nothing loads no model. Raises UserError.

    The processes of a launch share the pending samples; the first of them tells, tracks and summarises.
    """
    identity = identity_of(config)
    digest = hash_of(identity)
    folder = run_folder(config, digest)
    problems = config.dataset.problems()
    team = Team(f"{next(_runs)}-{digest}")  # a sweep can come to one run twice
    with RunStore.open(folder, team) as store:
        recorded = store.recorded()
        # Chains of one problem stand together, so that its prompt is read once.
        todo = [(p, c) for p in problems for c in range(config.num_chains) if (p.id, c) not in recorded]
        if todo:
            device = config.hardware.resolve()
            model = config.model.load(device)
            pending = _encode(config, model, todo)
            engine = _engine(config, model, pending, team)
            if not team.rank:
                describe(store, config, identity, device)
            _sample(store, config, digest, engine, pending, team)
        summary = stats.summarise(config.label(), store.records)
        if not team.rank:
            store.write_summary(summary)
    return RunResult(folder, summary, len(todo), len(store.records) - len(problems) * config.num_chains)


def describe(store: RunStore, config: Config, identity: dict[str, object], device: str) -> None:
    """Writes configuration, identity, and what this start runs on."""
    store.write_config(OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    store.write_session(identity, {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        **_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "host": socket.gethostname(),
        "device": _device_name(device),
    })


def _sample(store: RunStore, config: Config, digest: str, engine: BatchedEngine, pending: list[_Pending],
            team: Team) -> None:
    """Draws, grades and records the pending samples. What is under way when it is stopped is given up, not recorded."""
    from tqdm import tqdm

    info, first = RunInfo(digest, config.name, config.label(), plain(config), store.folder), not team.rank
    tracker, exit_code = Guarded(config.tracker, info) if first else None, 1
    pool = config.grader.start()
    # 0.5 s between redraws: where the output is no terminal each one is a line.
    bar = tqdm(total=len(pending), unit="sample", desc=config.label(), smoothing=0.1, mininterval=0.5, dynamic_ncols=True,
               disable=not first)
    drawn: dict[int, Finished] = {}

    def record(wait: bool = False) -> None:
        for number, grade in pool.finished(wait):
            keep(number, grade, drawn.pop(number))

    def keep(number: int, grade: Grade, done: Finished) -> None:
        store.append(_record(pending[number], grade, done, engine.model))
        count = team.add("recorded", 1)
        if tracker:
            tracker.log(_metrics(store.records[-1]), len(store.records))
            _show(bar, store.records, count)

    try:
        try:
            for done in engine.steps((number, _chain(config, pending[number])) for number in team.take(len(pending))):
                if done is not None and done.result is None:
                    keep(done.tag, Grade("error", None, done.failure), done)
                elif done is not None:
                    drawn[done.tag] = done
                    pool.submit(done.tag, engine.model.decode(done.result.path.tokens), pending[done.tag].problem.answer)
                record()
        except KeyboardInterrupt:
            record()  # what is graded is kept; what is not is drawn again
            raise
        record(wait=True)
        if tracker:
            _gather(store, tracker, bar, team, len(pending))
            tracker.summary(stats.summarise(config.label(), store.records), store.records)
        exit_code = 0
    finally:
        bar.close()
        pool.close()
        if tracker:
            tracker.finish(exit_code)
    _tell(engine, store, first)


def _gather(store: RunStore, tracker: Guarded, bar: tqdm, team: Team, total: int) -> None:
    """Waits for the other processes and tracks what they have recorded."""
    own = {(record["problem"], record["chain"]) for record in store.records}
    while (count := team.add("recorded", 0)) < total:
        _show(bar, store.records, count)
        time.sleep(0.5)
    store.reread()
    _show(bar, store.records, total)
    others = [record for record in store.records if (record["problem"], record["chain"]) not in own]
    for number, record in enumerate(others, start=len(store.records) - len(others) + 1):
        tracker.log(_metrics(record), number)


def _tell(engine: BatchedEngine, store: RunStore, first: bool) -> None:
    """What the engine has done goes into run.json, and samples that could not be drawn are told."""
    counters = engine.counters
    if first:
        store.add_to_session({"engine": {**counters._asdict(), "utilisation": counters.utilisation}})
        failed = [record for record in store.records if record["verdict"] == "error"]
        if failed:
            print(f"{store.folder}: {len(failed)} of {len(store.records)} samples could not be drawn and count as not "
                  f"correct: {failed[0]['problem']}: {failed[0]['reason']}", file=sys.stderr)


def _encode(config: Config, model: LanguageModel, todo: list[tuple[Problem, int]]) -> list[_Pending]:
    """Pending samples with their prompts. A prompt that leaves no room is refused before anything is drawn."""
    prompts = {}
    for problem, _ in todo:
        if problem.id not in prompts:
            text = config.dataset.prompt.replace("{question}", problem.question)
            prompts[problem.id] = model.encode(config.model.prompt(model.tokenizer, text), not config.model.chat)
            if not len(prompts[problem.id]):
                raise UserError(f"dataset.prompt: problem {problem.id} gives an empty prompt; allowed: at least one token")
            needed = len(prompts[problem.id]) + config.dataset.max_new_tokens
            if model.max_positions is not None and needed > model.max_positions:
                raise UserError(f"dataset.max_new_tokens: given {config.dataset.max_new_tokens}; allowed: at most "
                                f"{model.max_positions - len(prompts[problem.id])} (problem {problem.id} takes "
                                f"{len(prompts[problem.id])} of the model's {model.max_positions} positions)")
    return [_Pending(problem, chain, prompts[problem.id]) for problem, chain in todo]


def _engine(config: Config, model: LanguageModel, pending: list[_Pending], team: Team) -> BatchedEngine:
    """The engine, once its memory is known to be there. Raises UserError."""
    from dflash_mcmc.engine.batched import BatchedEngine
    from dflash_mcmc.engine.interface import Options
    from dflash_mcmc.engine.plan import plan

    prompt_length = max(len(entry.prompt) for entry in pending)
    share = -(-len(pending) // team.size)
    options = Options(**{name: getattr(config.hardware, name) for name in Options._fields})
    if team.size > 1:  # a process that reads many prompts ahead takes them from the others
        options = options._replace(read_ahead=min(options.read_ahead, -(-share // 4)))
    length = prompt_length + config.dataset.max_new_tokens
    drafter = config.draft.load(model)
    planned = plan(model, config.hardware.num_slots, share, length, prompt_length, options, config.hardware.memory_gb, drafter)
    asked = any(getattr(component, "needs_draft", False) for component in (config.blend, config.sampler))
    return BatchedEngine(model, config.blend, planned.num_slots, planned.max_length, options, prompt_length,
                         config.decoder.speculation(drafter), drafter if asked else None)


def _chain(config: Config, entry: _Pending):
    key = Key(config.seed).fold_in(entry.problem.id, entry.chain)
    return config.sampler.chain(entry.prompt, config.dataset.max_new_tokens, key)


def _record(entry: _Pending, grade: Grade, done: Finished, model: LanguageModel) -> dict:
    problem, cost = entry.problem, done.cost
    result = done.result or ChainResult(PathOfTokens.start(entry.prompt))
    path = result.path
    return {
        "problem": problem.id, "chain": entry.chain, "level": problem.level, "subject": problem.subject,
        "verdict": grade.verdict, "answer": grade.answer, "gold": problem.answer, "reason": grade.reason,
        "text": model.decode(path.tokens), "num_tokens": path.length, "ended": path.ended,
        "log_p": float(path.log_p.sum()), "proposals": result.proposals, "accepted": result.accepted,
        "moved": result.moved, "abandoned": result.abandoned, "law_error": result.law_error, **cost._asdict(),
        "seconds": round(done.seconds, 6), "share_seconds": round(done.share_seconds, 6), "tokens": path.tokens.tolist(),
        "trace": list(result.trace), **({"walk": list(done.walk)} if done.walk else {}),
    }


def _metrics(record: dict) -> dict[str, float]:
    metrics = {"sample/correct": float(record["verdict"] == "correct"), "sample/num_tokens": record["num_tokens"],
               "sample/log_p": record["log_p"], "sample/seconds": record["seconds"],
               "sample/token_forwards": record["token_forwards"]}
    if record["proposals"]:
        metrics["sample/acceptance"] = record["accepted"] / record["proposals"]
        metrics["sample/moved_rate"] = record["moved"] / record["proposals"]
        metrics["sample/abandoned_rate"] = record["abandoned"] / record["proposals"]
    if record["tokens_drafted"]:
        metrics["sample/accepted_length"] = record["tokens_drawn"] / record["blocks_drafted"]
    return metrics


def _show(bar: tqdm, records: list[dict], count: int) -> None:
    correct = sum(record["verdict"] == "correct" for record in records)
    bar.set_postfix_str(f"correct {100 * correct / len(records):.1f} % of {len(records)}" if records else "", refresh=False)
    bar.update(count - bar.n)


def _commit() -> dict[str, object]:
    """Commit of the code, and whether anything of it was changed since; null outside a checkout of this project."""
    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        top = git("rev-parse", "--show-toplevel")
        if top is None or Path(top) != PACKAGE.parent:
            return {"commit": None, "dirty": None}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except OSError:  # no git on this machine
        return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
