"""Trains a DFlash draft for a target: `python -m dflash_mcmc.train draft=tiny`. Starting a stopped run again resumes it.

The target first answers the prompts. Each step takes a batch of these responses. One forward computes the target's features,
and another one drafts blocks from random anchors. The drafted tokens are fitted to the target's tokens. Only the draft's own
weights are trained; the embedding and the head are the target's. All processes of a launch have the same weights, and each
process computes its share of every batch.

A run that is stopped and started again ends with the same weights. This requires that everything that determines step n
(texts, anchors, learning rate) is a function of n. A checkpoint holds the weights, the optimiser's state and the number of
steps. It is written at every evaluation.

The batched engine samples the responses once, for all trainings with the same ones. They are stored in a folder of their own,
in files ("pieces") of 256 prompts, which are written atomically. Each process of a launch claims the next missing piece when
it is free. A resumed run samples only the pieces that were not finished.

Source: DFlash (arXiv 2602.06036).
"""

import copy
import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from accelerate import Accelerator

from dflash_mcmc.config.identity import as_yaml
from dflash_mcmc.dataset.arith import LEVELS, make_problem
from dflash_mcmc.dataset.inputs import sources
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from dflash_mcmc.engine.batching import plan as memory
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.errors import ConfigError, RunBusy, UserError, note
from dflash_mcmc.ops import Chain, Draw, SamplingParams
from dflash_mcmc.process import bars, ranks
from dflash_mcmc.rng import Key
from dflash_mcmc.store.files import make_folder, write_atomically
from dflash_mcmc.store.folder import Locks
from dflash_mcmc.tracker import Guarded, RunInfo
from dflash_mcmc.train import loss as losses
from dflash_mcmc.train.recipe import DraftPlan, check_shape, identity_of, responses_folder, run_folder
from dflash_mcmc.types import ChainResult, Trajectory

_BETAS, _MAX_NORM = (0.9, 0.95), 1.0
"""Of AdamW, and the largest norm of the gradient: larger gradients are scaled down to it."""
_TRACK_EVERY = 10
_FREE_OF_START = ("block_size", "dtype", "num_target_layers", "max_positions")
"""Fields of a shape that no weight depends on. They may differ between `init` and the plan."""


def train(plan: DraftPlan) -> Path:
    """Trains to the end of the plan, from the last checkpoint if there is one. Returns the folder of the draft.

    Without a step, the draft that the training would start from is evaluated and exported.
    """
    prompts = questions(plan)
    device = plan.hardware.resolve()
    accelerator = Accelerator(cpu=device == "cpu")
    model = plan.model.load(device)
    shape = shape_of(plan, model)
    folder = run_folder(plan)
    make_folder(folder, "paths.outputs")
    requests = [Request("training", prompts.training if plan.steps else [], plan.responses.temperatures),
                *(Request(f"held-out-{t:g}", prompts.held_out, (t,)) for t in plan.responses.held_out)]
    training, *held_out = (responses(plan, model, responses_folder(plan), request) for request in requests)
    draft = first_draft(plan, shape, model).to(device)
    if accelerator.is_main_process:
        write_atomically(folder / "config.yaml", as_yaml(dataclasses.asdict(plan)))
    session = _Session(plan, accelerator, model, draft, training, dict(zip(plan.responses.held_out, held_out, strict=True)))
    if not plan.steps:
        figures = session.evaluate()
        if accelerator.is_main_process:
            append_figures(folder, {"step": 0, **figures})
            print(_describe(figures))
    else:
        figures = session.run(folder)
    target = Path(plan.export) if plan.export else folder / "draft"
    if accelerator.is_main_process:
        export(draft, plan, model, target, figures)
    accelerator.end_training()
    return target


def shape_of(plan: DraftPlan, model: LanguageModel) -> DFlashShape:
    """The draft's shape. Values that the plan leaves out are the target's. Raises UserError if it does not fit the target."""
    wanted, config, num_layers = plan.shape, model.config, len(model.layers)
    check_shape(wanted, num_layers)
    heads, mask = config.num_attention_heads, wanted.mask_token_id
    if mask is None:
        # If possible an id that is never sampled, so masks differ from all tokens.
        unused = model.forbidden.nonzero().flatten().tolist()
        mask = unused[0] if unused else getattr(model.tokenizer, "pad_token_id", None)
        if mask is None:
            raise ConfigError("shape.mask_token_id", None, "an id; the target has neither an unused id nor a padding token")
    rope = getattr(config, "rope_parameters", None) or {}
    shape = DFlashShape(
        hidden_size=config.hidden_size, num_layers=wanted.num_layers, num_heads=heads,
        num_key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=wanted.intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        block_size=wanted.block_size, mask_token_id=mask,
        target_layers=checkpoint.default_target_layers(num_layers, wanted.num_features), num_target_layers=num_layers,
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        # The draft uses default frequencies. Extensions of RoPE to long contexts assume earlier training on short contexts.
        rope={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        max_positions=config.max_position_embeddings, sliding=(None,) * wanted.num_layers,
    )
    checkpoint.check_pair(shape, hidden_size=config.hidden_size, vocab_size=model.vocab_size, num_layers=num_layers,
                          field="shape")
    return shape


def first_draft(plan: DraftPlan, shape: DFlashShape, model: LanguageModel) -> DFlash:
    """The draft before the first step, in float32: a new one, with the tensors that the plan starts from.

    The standard deviation of a matrix is 1 / sqrt(input width), which gives outputs the same scale as the inputs. At a width
    of 2,560 this is 0.02, the value of Qwen3. With 0.02 at every width, the layers of a small draft would hardly change an
    embedding. The draft would first predict the mask token itself and unlearn this only in hundreds of steps. The final norm
    is a copy of the target's. Raises UserError if the tensors do not fit.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(Key(plan.seed).fold_in("draft", "weights").integer(2**31))
        draft = DFlash(shape)
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        draft.norm.weight.data.copy_(model.final_norm.weight)  # the target's head was trained with this scale
    if start := plan.start():
        first = checkpoint.load(start.local(), torch.float32, "cpu")
        for name in (field.name for field in dataclasses.fields(first.shape) if field.name not in _FREE_OF_START):
            given, wanted = getattr(first.shape, name), getattr(shape, name)
            if given != wanted:
                raise ConfigError(start.field, start.path, f"a draft with {name} {wanted}, as the plan's; this one has "
                                  f"{given}")
        draft.load_state_dict(first.state_dict())
    return draft


class _Session:
    """The state of a training run: models, batches and held-out responses."""

    def __init__(self, plan: DraftPlan, accelerator: Accelerator, model: LanguageModel, draft: DFlash,
                 training: list[losses.Response], held_out: dict[float, list[losses.Response]]):
        self.plan, self.accelerator, self.model, self.draft, self.held_out = plan, accelerator, model, draft, held_out
        self.batches = losses.Epochs(training, plan.batch_size, plan.anchors, plan.prompt_end, plan.seed)
        if plan.steps and not self.batches.num_batches:
            raise ConfigError("batch_size", plan.batch_size, "fewer: most responses have a single token, from which a draft "
                              "learns nothing")
        self.candidates = None if plan.loss_ids is None or not plan.steps else losses.CandidateIds(
            training, plan.loss_ids, model.forbidden.cpu().numpy(), plan.seed)
        self.objective = losses.Objective(plan.target, plan.alpha, plan.gamma)
        self.kept = None
        if plan.keep_features and plan.steps:
            reader = partial(losses.read_target, model, draft.shape.target_layers, power=self.objective.power,
                             sums=self.candidates is not None)
            self.kept = losses.KeptReader(reader, self.batches.responses, plan.rows_at_once or plan.batch_size, model.device)

    def run(self, folder: Path) -> dict[str, object]:
        """Trains to the end. Returns the figures of the trained draft."""
        plan, first = self.plan, self.accelerator.is_main_process
        optimizer = torch.optim.AdamW(self.draft.parameters(), betas=_BETAS, weight_decay=plan.weight_decay, fused=True)
        info = RunInfo(folder.name.rpartition("-")[2], "train", "draft", dataclasses.asdict(plan), folder)
        tracker, exit_code = Guarded(plan.tracker, info) if first else None, 1

        def track(metrics: dict[str, float], step: int) -> None:
            if tracker and (step % _TRACK_EVERY == 0 or "train/loss" not in metrics):
                tracker.tell(lambda run: run.log(metrics, step))

        try:
            figures = run(TrainingLoop(
                name="train draft", folder=folder, steps=plan.steps, evaluate_every=plan.evaluate_every,
                    rate=lambda step: cosine(step, plan.steps, plan.learning_rate, plan.warmup_fraction),
                gradients=self.gradients, evaluate=self.evaluate, describe=_describe, track=track, first=first,
            ), self.draft, optimizer)
            exit_code = 0
        finally:
            if tracker:
                tracker.tell(lambda run: run.finish(exit_code))
        return figures

    def gradients(self, step: int) -> float:
        """Stores the gradients of the whole batch's loss and returns the loss in nats. They are the same in all processes."""
        batch = self.batches(step)
        # Every process computes the total weight of the batch. The parts then only need to be added.
        total = losses.weights_of(batch, self.draft.shape.num_drafted, self.plan.gamma).sum().item()
        candidates = None if self.candidates is None else self.candidates(step, batch.tokens).to(self.model.device)
        loss, numbers = torch.zeros(1, device=self.model.device), self.batches.indices(step)
        # The rows of this process, in parts of `rows_at_once` that are computed one after another.
        rows = range(self.accelerator.process_index, len(batch.lengths), self.accelerator.num_processes)
        at_once, autocast = self.plan.rows_at_once or max(1, len(rows)), self.plan.precision == "bfloat16"
        for part in (list(rows[start : start + at_once]) for start in range(0, len(rows), at_once)):
            blocks = batch.rows(part).to(self.model.device)
            known = None if self.kept is None else self.kept([numbers[row] for row in part])
            share = losses.loss_sum(self.draft, self.model, blocks, self.objective, autocast, candidates, known) / total
            share.backward()
            loss += share.detach()
        if self.accelerator.num_processes > 1:  # the loss and the gradients of all processes are added in one communication
            parameters = list(self.draft.parameters())
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = self.accelerator.reduce(torch.cat([loss, *(gradient.flatten() for gradient in gradients)]), "sum")
            loss, *summed = flat.split([1, *(p.numel() for p in parameters)])
            for parameter, gradient in zip(parameters, summed, strict=True):
                parameter.grad = gradient.view_as(parameter)
        return loss.item()

    def evaluate(self) -> dict[str, object]:
        """The accepted length on the held-out responses: `tau_T` for each of their temperatures T."""
        figures: dict[str, object] = {}
        for temperature, held_out in self.held_out.items():
            mine = held_out[self.accelerator.process_index :: self.accelerator.num_processes]
            at_once = self.plan.rows_at_once or self.plan.batch_size
            counted = torch.tensor(losses.speculated(self.draft, self.model, mine, at_once, self.plan.anchors))
            tokens, forwards = self.accelerator.reduce(counted.to(self.model.device), "sum").tolist()
            figures[f"tau_{temperature:g}"] = tokens / forwards
        return figures


def _describe(figures: dict[str, object]) -> str:
    taus = {name.removeprefix("tau_"): value for name, value in figures.items() if name.startswith("tau_")}
    return "tokens for each forward of the target: " + ", ".join(f"{tau:.2f} at temperature {t}" for t, tau in taus.items())


def export(draft: DFlash, plan: DraftPlan, model: LanguageModel, folder: Path,
           figures: dict[str, object]) -> None:
    """Writes a checkpoint in the published layout: weights rounded to bfloat16, and the training's record.

    The record has the training's identity, a hash of the target's weights, and `held_out_tau`, the accepted length on the
    held-out prompts at temperature 0, if the plan measures it. `python -m dflash_mcmc.drafts check` reads them.

    Args:
        figures: those of the draft, as `_Session.evaluate` returns them.
    """
    stored = copy.deepcopy(draft).to(torch.bfloat16)
    record = {**identity_of(plan), "model.weights": plan.model.weights_fingerprint()}
    if "tau_0" in figures:
        record["held_out_tau"] = figures["tau_0"]
    extra = {"vocab_size": model.vocab_size, "training": record}
    checkpoint.save(stored, folder, extra)


def cosine(step: int, steps: int, peak: float, warmup_fraction: float) -> float:
    """Warm-up over the first part of the run, then half a cosine down to zero (Loshchilov & Hutter 2017)."""
    warmup_steps = math.ceil(steps * warmup_fraction)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


EVALUATIONS = "metrics.jsonl"
_CHECKPOINT = "checkpoint.pt"


class TrainingLoop(NamedTuple):
    """The parts of a training run that the loop needs."""

    name: str
    """Label of the progress bar."""
    folder: Path
    steps: int
    evaluate_every: int
    """Steps between evaluations. Each evaluation writes a checkpoint and a line of `metrics.jsonl`."""
    rate: Callable[[int], float]
    """Learning rate as a function of the step."""
    gradients: Callable[[int], float]
    """Stores the gradients of a step's loss in the parameters and returns the loss in nats."""
    evaluate: Callable[[], dict[str, object]]
    """Computes figures of the current weights, for `metrics.jsonl`."""
    describe: Callable[[dict[str, object]], str]
    """Formats the figures as text for the terminal."""
    track: Callable[[dict[str, float], int], None] = lambda metrics, step: None
    """Receives (metrics, step) after every step (loss and learning rate) and every evaluation."""
    first: bool = True
    """Whether this process writes files and output. One process of a launch does so, because all have the same weights."""


def run(loop: TrainingLoop, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Trains to the end, from the last checkpoint if there is one. Returns the figures of the trained weights.

    Raises RunBusy if another process trains in the folder.
    """
    with ExitStack() as held:
        if loop.first and not held.enter_context(closing(Locks(loop.folder / "lock"))).take(0):
            raise RunBusy(f"{loop.folder}: another process trains here; allowed: one process, or wait until it ends")
        start, recent, figures, checkpointed = 0, [], {}, loop.folder / _CHECKPOINT
        if checkpointed.is_file():
            state = torch.load(checkpointed, weights_only=True, map_location="cpu")
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start = state["step"]
        bar = held.enter_context(bars.Bar(loop.steps, "step", loop.name, initial=start, shown=loop.first))
        for step in range(start, loop.steps):
            recent.append(optimise(loop, module, optimizer, step))
            bar.update(text=f"loss {recent[-1]:.3f}")
            if (step + 1) % loop.evaluate_every == 0 or step + 1 == loop.steps:
                # The evaluation precedes the checkpoint. A run that is stopped between the two repeats the evaluation.
                figures = {"step": step + 1, "loss": sum(recent) / len(recent), **loop.evaluate()}
                recent = []
                if loop.first:
                    temporary = loop.folder / f".{_CHECKPOINT}.{os.getpid()}.tmp"  # replaced atomically
                    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, temporary)
                    os.replace(temporary, checkpointed)
                    append_figures(loop.folder, figures)
                    bar.write(f"step {step + 1}: loss {figures['loss']:.3f}, {loop.describe(figures)}")
                numbers = {f"evaluation/{name}": value for name, value in figures.items() if isinstance(value, float)}
                loop.track(numbers, step + 1)
    return figures or loop.evaluate()  # nothing was left to train


def optimise(loop: TrainingLoop, module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Takes one optimiser step. Returns its loss in nats. Raises UserError, and changes no weight, if it is not finite."""
    rate = loop.rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loop.gradients(step)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), _MAX_NORM).item()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(f"learning_rate: given a rate of {rate:g} in step {step + 1}, which has a loss of {loss:g} and a "
                        f"gradient of norm {norm:g}; allowed: a rate with finite ones. The last checkpoint stays as it is")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loop.track({"train/loss": loss, "train/learning_rate": rate}, step + 1)
    return loss


def append_figures(folder: Path, figures: dict[str, object]) -> None:
    """Appends the figures of an evaluation to `metrics.jsonl`."""
    with (folder / EVALUATIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figures) + "\n")


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


class Request(NamedTuple):
    """A set of responses to sample."""

    name: str
    """Name of the folder, and part of the random key."""
    questions: Sequence[str]
    temperatures: Sequence[float]
    """Sampling temperatures. Consecutive questions cycle through them."""


def responses(plan: DraftPlan, model: LanguageModel, folder: Path, request: Request) -> list[losses.Response]:
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
            read += [losses.Response(tokens, int(length))
                     for tokens, length in zip(sequences, stored["prompt_lengths"], strict=True)]
    return read


def _draw(plan: DraftPlan, model: LanguageModel, request: Request, pieces: list[Path]) -> None:
    """Samples missing pieces. Raises ConfigError if the responses do not fit the model's positions or the memory."""
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
    work, share = memory.Workload(model, length, prompt_length, hardware.options()), -(-len(prompts) // ranks.world_size())
    planned = memory.plan(work, hardware.num_slots, min(_PIECE, share), hardware.memory_gb)
    engine = BatchedEngine(model, None, planned.num_slots, length, work.options, prompt_length)
    key = Key(plan.seed).fold_in("response", request.name)

    def chain(index: int) -> Chain:
        sampling = SamplingParams(temperature=request.temperatures[index % len(request.temperatures)])
        trajectory = yield Draw(Trajectory.start(prompts[index]), plan.responses.max_new_tokens, sampling, key.fold_in(index))
        return ChainResult(trajectory)

    with bars.Bar(len(prompts), "response", request.name, shown=not ranks.rank()) as bar:
        for piece in _claimed(pieces, bar):
            indices = range(piece * _PIECE, min((piece + 1) * _PIECE, len(prompts)))
            drawn: dict[int, losses.Response] = {}
            for done in engine.run((index, chain(index)) for index in indices):
                if done.result is None:
                    raise UserError(f"{request.name}, prompt {done.tag}: {done.failure}")
                index = cast("int", done.tag)
                tokens = np.concatenate((prompts[index], done.result.trajectory.tokens))
                drawn[index] = losses.Response(tokens.astype(np.int32), len(prompts[index]))
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


def _write(piece: Path, drawn: list[losses.Response]) -> None:
    np.savez(content := io.BytesIO(), tokens=np.concatenate([response.tokens for response in drawn]),
             lengths=np.array([response.length for response in drawn]),
             prompt_lengths=np.array([response.prompt_length for response in drawn]))
    write_atomically(piece, content.getvalue())
