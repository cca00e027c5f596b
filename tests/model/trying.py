"""A run over a damaged checkpoint ends in a result or in a refusal of one line. Anything else is a fault."""

import signal
import time
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import UserError
from dflash_mcmc.runner import plan
from tests.composing import composed
from tests.model.damage import PROBLEMS, TARGET, Damage, damaged
from tests.runs import execute

SECONDS = 120
"""After which a run counts as hanging. A run of the undamaged checkpoint takes about one."""
_DRAFTS = {"tiny_draft": "dflash", "tiny_dspark": "dspark", "tiny_dflash2": "dflash2"}


class HangError(BaseException):
    """A run does not come to an end."""


class Tried(NamedTuple):
    """What a run over a damaged checkpoint did."""

    name: str
    outcome: str
    """`ran`, `refused`, or `fault`."""
    message: str
    seconds: float


def tried(damage: Damage, folder: Path) -> Tried:
    """Runs a greedy sample with the damaged checkpoint, below a folder of its own."""
    begin = time.monotonic()
    before = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(SECONDS)
    try:
        checkpoint = damaged(damage, folder / "checkpoint")
        outcome, message = _outcome(damage, checkpoint, folder / "outputs")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if outcome == "refused" and list((folder / "outputs").glob("*/*/records*.jsonl")):
        outcome, message = "fault", f"refused after it wrote records: {message}"
    return Tried(f"{damage.checkpoint}: {damage.name}", outcome, message, round(time.monotonic() - begin, 2))


def _outcome(damage: Damage, checkpoint: Path, outputs: Path) -> tuple[str, str]:
    path = [f"model.path={checkpoint}"] if damage.checkpoint == TARGET else [
        "model=tiny", f"draft={_DRAFTS[damage.checkpoint]}", f"draft.path={checkpoint}", "decoder=speculative_match"]
    text = checkpoint.parent / PROBLEMS
    problem = ["dataset=arith", "dataset.limit=1"]
    if text.exists():
        problem = ["dataset=jsonl", f"dataset.path={text}", "dataset.id_field=id"]
    try:
        config = composed(outputs, *path, *problem, "sampler=greedy", "dataset.max_new_tokens=4")
        plan.check([Job(config)])
        execute(config)
    except UserError as error:
        return ("fault", f"more than a line: {error}") if "\n" in str(error) else ("refused", str(error))
    except HangError:
        return "fault", f"not ended after {SECONDS} s"
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"
    return "ran", ""


def _hang(*_) -> None:
    raise HangError
