"""What a component may ask of the run that it is a part of, and of the run's other parts.

`config.schema.Config` has all of it. None of the components knows the root or the class of another group.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from dflash_mcmc.fields import runtime


@dataclass(slots=True, kw_only=True)
class Assumed:
    """Assumptions of an estimate (`runner/plan.py`), which draws nothing."""

    prompt_length: int = runtime(100, "mean length of a prompt in tokens", ge=1)
    answer_length: float = runtime(0.6, "mean length of an answer, as a share of dataset.max_new_tokens", gt=0, le=1)
    acceptance: float = runtime(0.5, "share of the proposals' tokens that are in accepted proposals", ge=0, le=1)
    abandoned_at: float = runtime(0.5, "share of a rejected proposal that is drawn before early rejection stops it", ge=0,
                                  le=1)
    identical: float = runtime(0.3, "share of the tokens to draw that a proposal shares with the state", ge=0, le=1)
    shared: float = runtime(0.94, "share of the tokens in probe=speculative_mcmc's drawn blocks that belong to a common "
                            "prefix, evaluated once for several blocks", ge=0, le=1)
    kept: float = runtime(4.0, "tokens that sample and match keeps of each block in probe=sampled_verify, the target's own "
                          "included", ge=1)


class Settings(Protocol):
    """One run. Each group is an object of its base class, such as `Sampler`. Components do not import those of others."""

    name: str
    seed: int
    num_chains: int
    dry_run: bool
    assumed: Assumed
    paths: Any
    model: Any
    draft: Any
    blend: Any
    sampler: Any
    potential: Any
    decoder: Any
    probe: Any
    dataset: Any
    grader: Any
    hardware: Any
    engine: Any


def groups_of(config: Settings) -> tuple[str, ...]:
    """The groups that the outputs depend on, for the probe or for samples."""
    blend = ("blend",) if config.probe.reads_blend and not config.blend.is_null else ()
    sources = config.probe.sources()
    potential = ("potential",) if "sampler" in sources and not config.potential.is_null else ()
    return (*sources, *blend, *potential, *(("engine",) if config.engine.rounds_otherwise else ()))
