"""The framework from Python: `sample` draws from a loaded model, `component` makes a sampler with the values of `conf/`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mcmc.config.checks import checked
from dflash_mcmc.config.command import compose_once
from dflash_mcmc.config.overrides import quoted
from dflash_mcmc.config.schema import Config
from dflash_mcmc.data.conversations import Conversation
from dflash_mcmc.errors import ConfigError, UserError, did_you_mean
from dflash_mcmc.fields import check_bounds
from dflash_mcmc.model import Model
from dflash_mcmc.registry import GROUPS, components
from dflash_mcmc.types import ChainResult, Cost, Problem, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dflash_mcmc.inference.interface import ChainTarget, Finished, Tag
    from dflash_mcmc.inference.language_model import LanguageModel


class Sample(NamedTuple):
    """The result of one chain."""

    prompt: int
    """Index of the prompt in the order given."""
    id: str
    """Name of the prompt, which the randomness depends on."""
    chain: int
    text: str
    """Generated text without special tokens."""
    tokens: list[int]
    """Generated token ids."""
    log_p: float
    """Log probability of the tokens under the (blended) target at temperature 1, in nats."""
    log_q: float
    """Log probability of the tokens under the sampling parameters that they were drawn with, in nats."""
    proposals: int
    """Metropolis-Hastings proposals."""
    accepted: int
    """Accepted proposals."""
    moved: int
    """Accepted proposals that differ from the sequence they replace."""
    cost: Cost
    """Tokens and forward passes that the chain used."""
    ended: bool
    """Whether the last token is a stop id."""
    trace: tuple[dict[str, Any], ...]
    """One entry for each proposal: block, step, cut, lengths, log ratio, decision."""
    failure: str = ""
    """Why the chain could not be drawn; the other fields are then empty."""


def component(group: str, name: str, **fields: Any) -> Any:
    """A component with the values of `conf/<group>/<name>.yaml`, except for the given fields.

    Args:
        group: a group of components, such as "sampler", "blend", "decoder", "draft" or "model".
        name: an option of the group: `python -m dflash_mcmc.catalogue` lists them.
        fields: values of fields; `python -m dflash_mcmc.catalogue GROUP` lists them.

    Raises:
        UserError: for an unknown option or field, or a value out of bounds, with the message of the command line.
    """
    if group not in GROUPS:
        raise UserError(f"unknown group {group!r}{did_you_mean(group, GROUPS)}; allowed: {', '.join(GROUPS)}")
    given = [_override(f"{group}.{field}", value) for field, value in fields.items()]
    return getattr(compose_once("config", [f"{group}={name}", *given], Config)[0], group)


def sample(model: PreTrainedModel | str | Path | Any, tokenizer: PreTrainedTokenizerBase | None,
           prompts: Sequence[str] | Mapping[str, str], *, sampler: Any, blend: Any = None, decoder: Any = None,
           draft: Any = None, engine: Any = None, num_chains: int = 1, max_new_tokens: int = 128, seed: int = 0,
           num_slots: int | None = 32, chat: bool = True, progress: bool = True) -> list[Sample]:
    """Draws `num_chains` samples of each prompt, all chains in one batch.

    The same seed and prompt ids give the tokens of the command line. The prompts of a list have the ids "00000", "00001",
    ..., like the rows of a file with `dataset=jsonl`. The keys of a mapping are the ids of its prompts.

    Args:
        model: a loaded `transformers` causal language model with full attention; or the folder or hub name of one; or a
            component of the group `model`.
        tokenizer: the tokenizer of a loaded model; None otherwise.
        prompts: texts, or texts by id.
        sampler: a component, see `component`; or the name of an option, which takes the values of `conf/`.
        blend: a component or a name; None leaves the target as it is.
        decoder: a component or a name; None decodes token by token.
        draft: a component or a name, for a decoder, blend or sampler that needs one.
        engine: a component or a name; None takes the engine of slots. Only that one takes a loaded model.
        num_slots: chains in the batch at once; None takes as many as the memory holds.
        chat: whether the prompts go through the tokenizer's chat template, with thinking off. A component of the group
            `model` has this option itself.
        progress: whether a progress bar is shown.

    Returns:
        A sample for each prompt and chain, in this order.

    Raises:
        UserError: for values that do not fit together, with the message of the command line.
    """
    from dflash_mcmc.run import build

    chosen = {"sampler": sampler, "blend": blend, "decoder": decoder, "draft": draft, "engine": engine}
    config = _config(chosen, {"seed": seed, "num_chains": num_chains, "hardware.num_slots": num_slots,
                              "dataset.max_new_tokens": max_new_tokens, "dataset.prompt": "{question}"})
    problems = _problems(prompts)
    with _loaded(model, tokenizer, chat, config) as target:
        config = checked(config)
        token_ids = build.prompts(config, target, problems)
        runner = config.engine.start(config, target, max(map(len, token_ids.values())), len(problems) * num_chains)
        chains = (((index, chain), build.chain(config, config.sampler, problem.id, chain, token_ids[problem.id]))
                  for index, problem in enumerate(problems) for chain in range(num_chains))
        with closing(runner):
            samples = [_sample(done, problems[done.tag[0]], token_ids, target)
                       for done in _shown(runner.run(chains), len(problems) * num_chains, progress)]
    return sorted(samples, key=lambda drawn: (drawn.prompt, drawn.chain))


def _config(chosen: dict[str, Any], values: dict[str, Any]) -> Config:
    """The configuration with the chosen components. Names are composed from `conf/`; objects are used as they are."""
    named = [f"{group}={choice}" for group, choice in chosen.items() if isinstance(choice, str)]
    overrides = ["tracker=none", *named, *(_override(field, value) for field, value in values.items())]
    config, _ = compose_once("config", overrides, Config)
    for group, choice in chosen.items():
        if choice is not None and not isinstance(choice, str):
            if not _is_component(group, choice):
                raise ConfigError(group, choice, f"a component of the group, or one of {', '.join(components(group))}")
            check_bounds(choice, f"{group}.")
            setattr(config, group, choice)
    return config


def _is_component(group: str, value: object) -> bool:
    return any(type(value) is known.cls for known in components(group).values())


def _problems(prompts: Sequence[str] | Mapping[str, str]) -> list[Problem]:
    if isinstance(prompts, str) or not prompts:
        raise ConfigError("prompts", prompts, "a list of texts, or texts by id, and at least one")
    named = prompts if isinstance(prompts, Mapping) else {f"{index:05d}": text for index, text in enumerate(prompts)}
    for text in named.values():
        if not isinstance(text, str):
            raise ConfigError("prompts", text, "texts")
    return [Problem(name, text, "") for name, text in named.items()]


@contextmanager
def _loaded(model: Any, tokenizer: Any, chat: bool, config: Config) -> Iterator[ChainTarget]:
    """The target, which also becomes part of the configuration. Inside the context a loaded model is in evaluation mode."""
    if isinstance(model, (str, Path)) or _is_component("model", model):
        if tokenizer is not None:
            raise ConfigError("tokenizer", type(tokenizer).__name__, "None with a folder, a hub name or a component")
        config.model = component("model", "hf", path=str(model), chat=chat) if isinstance(model, (str, Path)) else model
        config.model.check(config)
        yield config.engine.load(config, config.hardware.resolve())
        return
    if tokenizer is None:
        raise ConfigError("tokenizer", None, "the tokenizer of a loaded model")
    from dflash_mcmc.inference.language_model import LanguageModel

    training = model.training
    model.eval()
    try:
        target = LanguageModel(model, tokenizer)
        config.model = _LoadedModel(target, chat)
        yield config.engine.load(config, str(target.device))
    finally:
        model.train(training)


@dataclass(slots=True)
class _LoadedModel(Model):
    """The component of the group `model` for a model that is loaded already."""

    target: LanguageModel
    chat: bool

    def num_layers(self) -> int:
        return len(self.target.layers)

    def load(self, device: str) -> LanguageModel:
        return self.target

    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def render(self, tokenizer: Any, conversation: Conversation) -> str:
        if not self.chat:
            return conversation.as_text()
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("chat", True, "False, since the tokenizer has no chat template")
        return conversation.with_template(tokenizer, enable_thinking=False)


def _sample(done: Finished[tuple[int, int]], problem: Problem, token_ids: dict[str, Any], target: ChainTarget) -> Sample:
    index, chain = done.tag
    result = done.result or ChainResult(Trajectory.start(token_ids[problem.id]))
    drawn = result.trajectory
    return Sample(index, problem.id, chain, target.decode(drawn.tokens), drawn.tokens.tolist(), float(drawn.log_p.sum()),
                  float(drawn.log_q.sum()), result.proposals, result.accepted, result.moved, done.cost, drawn.ended,
                  result.trace, done.failure)


def _shown(chains: Iterator[Finished[Tag]], total: int, progress: bool) -> Iterator[Finished[Tag]]:
    from tqdm import tqdm

    return tqdm(chains, total=total, unit="sample", mininterval=0.5, dynamic_ncols=True, disable=not progress)


def _override(field: str, value: Any) -> str:
    """The value as the command line writes it."""
    return f"{field}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, (str, Path)):
        return quoted(str(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
