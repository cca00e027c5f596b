"""Builds the parts that draw the samples of a configured run: prompts, the engine, and the chain of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.process import ranks
from dflash_mcmc.registry import name_of
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Problem

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.blend import Blend
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.batched import BatchedEngine
    from dflash_mcmc.engine.batching.interface import ChainTarget, Options
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import DraftSize, MemoryPlan, TargetShape
    from dflash_mcmc.engine.batching.prompt_encoder import PromptEncoder
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.speculation import Speculation
    from dflash_mcmc.ops import Chain
    from dflash_mcmc.sampler import Sampler


def prompts(config: Config, model: ChainTarget | PromptEncoder, problems: Sequence[Problem],
            room: int | None = None) -> dict[str, np.ndarray]:
    """The token ids of each problem's prompt, by problem id. Raises UserError for a prompt that leaves too little room.

    Args:
        room: positions needed after a prompt; None means dataset.max_new_tokens.
    """
    room = config.dataset.max_new_tokens if room is None else room
    found = encoded(config, model, problems)
    for name, tokens in found.items():
        if model.max_positions is not None and len(tokens) + room > model.max_positions:
            raise UserError(f"dataset.max_new_tokens: given {room}; allowed: at most {model.max_positions - len(tokens)} "
                            f"(problem {name} takes {len(tokens)} of the model's {model.max_positions} positions)")
    return found


def encoded(config: Config, model: ChainTarget | PromptEncoder, problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """The token ids of each problem's prompt, of any length, by problem id. Raises UserError for an empty prompt."""
    found, prompting = {}, config.dataset.prompting()
    for problem in problems:
        if problem.id not in found:
            found[problem.id] = model.encode(
                config.model.render(model.tokenizer, prompting.conversation(problem)), not config.model.chat)
            if not len(found[problem.id]):
                raise UserError(f"dataset.prompt: problem {problem.id} gives an empty prompt; allowed: at least one token")
    return found


def first_prompt(config: Config) -> str:
    """The whole prompt of the first requested problem as text, with special tokens.

    Loads the tokenizer but not the model. Raises UserError.
    """
    from dflash_mcmc.config.schema import groups_of

    if not {"model", "dataset"} <= set(groups_of(config)):
        raise ConfigError("probe", name_of(config.probe), "with show=prompt: none, or a probe that uses a model and a dataset")
    problem = config.dataset.problems()[0]
    tokenizer = config.model.tokenizer()
    text = config.model.render(tokenizer, config.dataset.prompting().conversation(problem))
    tokens = tokenizer(text, add_special_tokens=not config.model.chat)["input_ids"]
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def slots_engine(config: Config, model: LanguageModel, prompt_length: int, num_chains: int) -> BatchedEngine:
    """The engine of slots with the configured draft, blend and decoder. Raises UserError if the memory does not suffice.

    Args:
        prompt_length: length of the longest prompt.
        num_chains: number of chains that all processes draw together.
    """
    model = model.stopping_at(config.dataset.stop)
    drafter = config.draft.load(model)
    asked = config.blend.needs_draft or config.sampler.needs_draft
    speculation = config.decoder.speculation(drafter)
    num_draws = num_chains * config.sampler.width()
    return engine_of(config, model, prompt_length, num_draws, config.blend, speculation, drafter, asked)


def engine_of(config: Config, model: LanguageModel, prompt_length: int, num_draws: int, blend: Blend | None,
              speculation: Speculation | None = None, drafter: Drafter | None = None, asked: bool = False) -> BatchedEngine:
    """An engine with the configuration's hardware. Raises UserError.

    Args:
        num_draws: number of draws that all processes together can have in progress.
        asked: whether blend or sampler use the draft.
    """
    from dflash_mcmc.engine.batching.batched import BatchedEngine

    options, planned = memory_plan(config, model, prompt_length, num_draws, drafter)
    if planned.num_pages or config.hardware.num_slots is None:  # what the plan has chosen
        note(planned.describe())
    return BatchedEngine(model, blend, planned.num_slots, planned.max_length, options, prompt_length, speculation,
                         drafter if asked else None, planned.num_pages)


def memory_plan(config: Config, model: LanguageModel | TargetShape, prompt_length: int, num_draws: int,
                drafter: Drafter | DraftSize | None, still_to_load: int = 0) -> tuple[Options, MemoryPlan]:
    """The options and the memory of an engine with the configuration's hardware. Raises ConfigError if it does not fit.

    Args:
        num_draws: number of draws that all processes together can have in progress.
        still_to_load: bytes of weights that are not loaded yet.
    """
    from dflash_mcmc.engine.batching.plan import Workload, options_within, plan

    processes = ranks.place().total
    share = -(-num_draws // processes)
    options = config.hardware.options()
    if processes > 1:  # a process that reads many prompts ahead claims them before the others can
        options = options._replace(read_ahead=min(options.read_ahead, -(-share // 4)))
    length = prompt_length + config.dataset.max_new_tokens
    hardware, work = config.hardware, Workload(model, length, prompt_length, options, drafter)
    planned = plan(work, hardware.num_slots, share, hardware.memory_gb, hardware.kv_cache, still_to_load)
    return options_within(work, planned), planned


def chain(config: Config, sampler: Sampler, problem: str, number: int, prompt: np.ndarray) -> Chain:
    """Chain `number` of a problem. Its random numbers depend only on seed, problem and number."""
    return sampler.chain(prompt, config.dataset.max_new_tokens, Key(config.seed).fold_in(problem, number))
