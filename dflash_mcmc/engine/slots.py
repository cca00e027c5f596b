"""The engine of this package: a ragged batch of chains over a static cache of slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_mcmc.components import Settings, name_of, register
from dflash_mcmc.engine import Engine
from dflash_mcmc.engine.batching.interface import ChainRunner, Options
from dflash_mcmc.errors import ConfigError, note
from dflash_mcmc.process import ranks

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.engine.batching import batched, language_model
    from dflash_mcmc.engine.batching.plan import DraftSize, MemoryPlan, TargetShape
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.rules import Speculation


@register("engine", "slots")
@dataclass(slots=True, kw_only=True)
class Slots(Engine):
    """This package's own engine, for every blend, decoder, draft and probe; the fields of hardware are its options."""

    is_null = True
    mixes_stops = True
    takes_potential = True
    calls_functions = True

    def load(self, config: Settings, device: str) -> "language_model.LanguageModel":
        """The model of transformers. Sets the threads of its arithmetic. Raises UserError."""
        from dflash_mcmc.engine.batching.linear import is_small

        target = config.model.load(device)
        config.hardware.set_threads(all(is_small(weight.numel()) for weight in target.decoder.parameters()))
        return target

    def resource(self, target: "language_model.LanguageModel") -> object:
        """The model's layers, whose outputs and attention belong to a run."""
        return target.decoder

    def start(self, config: Settings, target: "language_model.LanguageModel", prompt_length: int, num_chains: int,
              second: "Mapping[bytes, np.ndarray] | None" = None) -> ChainRunner:
        """The batched engine with the configured draft, blend and decoder. Raises UserError if the memory does not suffice."""
        if config.blend.has_prompts and second is None:
            raise ConfigError("blend", name_of(config.blend), "another blend here: only a run of samples has second prompts")
        model = target.stopping_at(config.dataset.stop)
        drafter = config.draft.load(model)
        if config.draft.reduces():  # known only now if its files were not here before
            config.sampler.check(config)
        num_draws = num_chains * config.sampler.width()  # a chain can ask for several draws together
        return engine_of(config, model, prompt_length, num_draws, config.blend, config.decoder.speculation(drafter), drafter,
                         config.blend.needs_draft or config.sampler.needs_draft, second if config.blend.has_prompts else None)

    def blend_width(self, blend: Any, target: "language_model.LanguageModel", prompts: "Sequence[np.ndarray]") -> float | None:
        layers = blend.tapped_layers(len(target.layers))
        if not layers:
            return None
        import torch

        ratios = []
        with torch.inference_mode(), target.tapped(layers) as tapped:
            for prompt in prompts:
                hidden = target.hidden(torch.from_numpy(prompt)[None].to(target.device))[0, -_LAST:]
                other = blend.auxiliary([state[0, -_LAST:] for state in tapped], target.final_norm)
                if other is None:
                    return None
                own, mixed = (target.logits(state)[:, ~target.forbidden].std(dim=-1) for state in (hidden, other))
                ratios.append(float((mixed / own).mean()))
        return sum(ratios) / len(ratios)


_LAST = 16
"""Tokens at the end of a prompt that `blend_width` reads."""


def engine_of(config: Settings, model: "language_model.LanguageModel", prompt_length: int, num_draws: int, blend: Any,
              speculation: "Speculation | None" = None, drafter: "Drafter | None" = None,
              uses_draft: bool = False, second: "Mapping[bytes, np.ndarray] | None" = None) -> "batched.BatchedEngine":
    """An engine with the configuration's hardware. Raises UserError.

    Args:
        num_draws: number of draws that all processes together can have in progress.
        uses_draft: whether blend or sampler use the draft.
        second: the companion's prompts by the bytes of the target's; None if it reads the same.
    """
    from dflash_mcmc.engine.batching import batched, linear

    companion = None if blend is None else blend.companion(model)
    options, planned = memory_plan(config, model, prompt_length, num_draws, drafter, companion=companion)
    if config.hardware.num_slots is None:  # what the plan has chosen
        note(planned.describe())
    # By the configuration alone: the bits depend neither on what is pending, nor on memory and processes.
    draft = drafter or config.draft.size()
    few = (config.hardware.num_slots or linear.FEW + 1) * (1 + (draft.num_drafted if draft else 0)) <= linear.FEW
    return batched.BatchedEngine(model, blend, planned.num_slots, planned.max_length, options, prompt_length, speculation,
                                 drafter if uses_draft else None, companion, second, few)


def memory_plan(config: Settings, model: "language_model.LanguageModel | TargetShape", prompt_length: int, num_draws: int,
                drafter: "Drafter | DraftSize | None", still_to_load: int = 0,
                companion: "language_model.LanguageModel | TargetShape | None" = None) -> "tuple[Options, MemoryPlan]":
    """The options and the memory of an engine with the configuration's hardware. Raises ConfigError if it does not fit.

    Args:
        num_draws: number of draws that all processes together can have in progress.
        still_to_load: bytes of weights that are not loaded yet.
        companion: the model whose logits a blend mixes in; None without one.
    """
    from dflash_mcmc.engine.batching.plan import Workload, plan

    processes = ranks.place().total
    share = -(-num_draws // processes)
    options = config.hardware.options()
    if processes > 1:  # a process that reads many prompts ahead claims them before the others can
        options = options._replace(read_ahead=min(options.read_ahead, -(-share // 4)))
    length = prompt_length + config.dataset.max_new_tokens
    hardware, work = config.hardware, Workload(model, length, prompt_length, options, drafter, companion)
    return options, plan(work, hardware.num_slots, share, hardware.memory_gb, still_to_load)
