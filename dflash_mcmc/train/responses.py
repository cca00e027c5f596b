"""The target's responses to the prompts. The batched engine samples them once, for all trainings with the same responses.

They are stored in a folder of their own, in files ("pieces") of 256 prompts, which are written atomically. Each process of a
launch claims the next missing piece when it is free. A resumed run samples only the pieces that were not finished.
"""

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dflash_mcmc.dataset.arith import LEVELS, make_problem
from dflash_mcmc.dataset.inputs import sources
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.process import bars, ranks
from dflash_mcmc.rng import Key
from dflash_mcmc.store.files import make_folder, write_atomically
from dflash_mcmc.store.folder import Locks
from dflash_mcmc.train.recipe import DraftPlan
from dflash_mcmc.types import ChainResult, Trajectory

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.language_model import LanguageModel


class Questions(NamedTuple):
    """The questions. Their order matters: random numbers depend on a question's index."""

    training: list[str]
    held_out: list[str]


def questions(plan: DraftPlan) -> Questions:
    """The questions of a plan. Raises UserError if a file is invalid, or if it has fewer questions than the plan asks for.

    Without a file they are of alternating levels. A held-out one is no training question, and rarely a problem of
    `dataset=arith`.
    """
    prompts = plan.prompts
    if prompts.path is None:
        def make(split: str, use: str, count: int) -> list[str]:
            key = Key(plan.seed).fold_in("draft", use)
            return [make_problem(key.fold_in(index), LEVELS[index % len(LEVELS)], split).question for index in range(count)]

        assert prompts.num is not None, "DraftPlan.check refuses a plan with neither prompts.path nor prompts.num"
        every = Questions(make("train", "prompt", prompts.num), make("test", "held out", prompts.held_out))
    else:
        texts = [row[prompts.field] for row in sources.of_file(prompts.path, [prompts.field], "prompts.path")]
        for line, question in enumerate(texts, start=1):
            if not isinstance(question, str):
                raise ConfigError("prompts.field", prompts.field, f"a field with a text; row {line} has {question!r:.60}")
        left = len(texts) - prompts.held_out
        if left < 1:
            raise ConfigError("prompts.held_out", prompts.held_out,
                              f"at most {len(texts) - 1} of the file's {len(texts)} lines")
        held_out = dict.fromkeys(texts[left:])
        training = [text for text in texts[:left] if text not in held_out]
        if len(training) < left:
            note(f"prompts.path: {left - len(training)} lines are not trained on, since they equal held-out ones")
        if prompts.num is not None and prompts.num > len(training):
            raise ConfigError("prompts.num", prompts.num, f"at most {len(training)} of the file's {len(texts)} lines: the "
                              "others are held out")
        every = Questions(training[: prompts.num], texts[left:])
    if plan.batch_size > len(every.training):
        raise ConfigError("batch_size", plan.batch_size, f"at most {len(every.training)}, the number of training prompts")
    return every


_PIECE = 256
_POLL_SECONDS = 0.1


class Response(NamedTuple):
    """A prompt with the target's answer."""

    tokens: np.ndarray
    """int32 (length,): the prompt, then the answer, including its stop id if it has one."""
    prompt_length: int

    @property
    def length(self) -> int:
        return len(self.tokens)


class Request(NamedTuple):
    """A set of responses to sample."""

    name: str
    """Name of the folder, and part of the random key."""
    questions: Sequence[str]
    temperatures: Sequence[float]
    """Sampling temperatures. Consecutive questions cycle through them."""


def responses(plan: DraftPlan, model: "LanguageModel", folder: Path, request: Request) -> list[Response]:
    """The responses of a request; missing ones are sampled. Raises UserError if a prompt is too long or sampling fails."""
    here = folder / request.name
    make_folder(here, "paths.outputs")
    pieces = [here / f"{index:05d}.npz" for index in range(-(-len(request.questions) // _PIECE))]
    if not all(piece.is_file() for piece in pieces):
        _draw(plan, model, request, pieces)
    read = []
    for piece in pieces:
        with np.load(piece) as stored:
            sequences = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
            read += [Response(tokens, int(length)) for tokens, length in zip(sequences, stored["prompt_lengths"], strict=True)]
    return read


def _draw(plan: DraftPlan, model: "LanguageModel", request: Request, pieces: list[Path]) -> None:
    """Samples missing pieces. Raises ConfigError if the responses do not fit the model's positions or the memory."""
    from dflash_mcmc.engine.batching.batched import BatchedEngine
    from dflash_mcmc.engine.batching.plan import Workload
    from dflash_mcmc.engine.batching.plan import plan as plan_memory

    prompts = []
    for question in request.questions:
        text = plan.model.prompt(model.tokenizer, plan.prompts.template.replace("{question}", question))
        prompts.append(model.encode(text, not plan.model.chat))
        if not len(prompts[-1]):
            raise ConfigError("prompts.path", plan.prompts.path, f"prompts of at least one token; {question!r} gives an "
                              "empty one")
    prompt_length, horizon, hardware = max(map(len, prompts)), plan.responses.max_new_tokens, plan.hardware
    if model.max_positions is not None and prompt_length + horizon > model.max_positions:
        raise ConfigError("responses.max_new_tokens", horizon, f"at most {model.max_positions - prompt_length}: the longest "
                          f"prompt takes {prompt_length} of the model's {model.max_positions} positions")
    length = prompt_length + horizon
    work, share = Workload(model, length, prompt_length, hardware.options()), -(-len(prompts) // ranks.world_size())
    planned = plan_memory(work, hardware.num_slots, min(_PIECE, share), hardware.memory_gb)
    engine = BatchedEngine(model, None, planned.num_slots, length, work.options, prompt_length)
    key = Key(plan.seed).fold_in("response", request.name)

    def chain(index: int) -> Chain:
        sampling = SamplingParams(temperature=request.temperatures[index % len(request.temperatures)])
        trajectory = yield Draw(Trajectory.start(prompts[index]), plan.responses.max_new_tokens, sampling, key.fold_in(index))
        return ChainResult(trajectory)

    with bars.Bar(len(prompts), "response", request.name, shown=not ranks.rank()) as bar:
        for piece in _claimed(pieces, bar):
            indices = range(piece * _PIECE, min((piece + 1) * _PIECE, len(prompts)))
            drawn: dict[int, Response] = {}
            for done in engine.run((index, chain(index)) for index in indices):
                if done.result is None:
                    raise UserError(f"{request.name}, prompt {done.tag}: {done.failure}")
                index = cast("int", done.tag)
                tokens = np.concatenate((prompts[index], done.result.trajectory.tokens))
                drawn[index] = Response(tokens.astype(np.int32), len(prompts[index]))
                bar.update()
            _write(pieces[piece], [drawn[index] for index in indices])


def _claimed(pieces: list[Path], bar: bars.Bar) -> Iterator[int]:
    """Yields the numbers of missing pieces that no other process samples. Ends when all pieces exist."""
    with closing(Locks(pieces[0].parent / "lock")) as locks:
        while missing := [index for index, piece in enumerate(pieces) if not piece.is_file()]:
            for index in missing:
                if locks.take(index) and not pieces[index].is_file():  # it may be there by now
                    yield index
                locks.free(index)
            bar.update(min(sum(piece.is_file() for piece in pieces) * _PIECE, bar.total) - bar.n)
            time.sleep(_POLL_SECONDS)


def _write(piece: Path, drawn: list[Response]) -> None:
    np.savez(content := io.BytesIO(), tokens=np.concatenate([response.tokens for response in drawn]),
             lengths=np.array([response.length for response in drawn]),
             prompt_lengths=np.array([response.prompt_length for response in drawn]))
    write_atomically(piece, content.getvalue())
