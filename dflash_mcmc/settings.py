"""What a component may ask of the run that it is a part of, and of the run's other parts.

`config.schema.Config` has all of it. It stands above the components: none of them knows the root or the class of another
group. A class here lists what others read of a group; the group's base class says what each member means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dflash_mcmc.engine.batching.interface import TargetBlend
from dflash_mcmc.fields import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy as np

    from dflash_mcmc.dataset.inputs.conversations import Conversation, Prompting
    from dflash_mcmc.engine.batching.interface import ChainRunner, ChainTarget, Hidden, Options
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import DraftSize, TargetShape
    from dflash_mcmc.engine.batching.prompt_encoder import PromptEncoder
    from dflash_mcmc.engine.speculative.drafter import Drafter
    from dflash_mcmc.engine.speculative.speculation import Speculation
    from dflash_mcmc.grading.verdicts import GradingPool
    from dflash_mcmc.model.files import Files
    from dflash_mcmc.ops import Chain, SamplingParams
    from dflash_mcmc.rng import Key
    from dflash_mcmc.types import ExpectedCost, Problem


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


class Part(Protocol):
    """A component, as the others see it."""

    is_null: ClassVar[bool]
    needs_draft: ClassVar[bool]


class ModelPart(Part, Protocol):
    """`model`."""

    chat: bool
    @property
    def date(self) -> str: ...
    @property
    def thinking(self) -> list[str] | None: ...
    def num_layers(self) -> int | None: ...
    def shape(self, device: str) -> TargetShape | None: ...
    def prompt_encoder(self) -> PromptEncoder | None: ...
    def rope_override(self) -> dict[str, Any] | None: ...
    def files(self, weights: bool = True) -> Files | None: ...
    def load(self, device: str) -> LanguageModel: ...
    def tokenizer(self) -> Any: ...
    def render(self, tokenizer: Any, conversation: Conversation) -> str: ...


class DraftPart(Part, Protocol):
    """`draft`."""

    has_density: ClassVar[bool]
    has_model: ClassVar[bool]
    is_source: ClassVar[bool]
    reads_features: ClassVar[bool]
    def load(self, target: LanguageModel) -> Drafter | None: ...
    def reduces(self) -> bool: ...
    def size(self) -> DraftSize | None: ...


class BlendPart(Part, TargetBlend, Protocol):
    """`blend`."""

    has_prompts: ClassVar[bool]
    needs_companion: ClassVar[bool]
    def other(self) -> BlendPart: ...
    def companion(self, target: LanguageModel) -> LanguageModel | None: ...
    def auxiliary(self, tapped: Sequence[Hidden], final_norm: Callable[[Hidden], Hidden]) -> Hidden | None: ...
    def second_prompts(self, config: Settings, model: ChainTarget | PromptEncoder, problems: Sequence[Problem],
                       prompts: Mapping[str, np.ndarray]) -> Mapping[bytes, np.ndarray]: ...


class SamplerPart(Part, Protocol):
    """`sampler`."""

    is_deterministic: ClassVar[bool]
    takes_potential: ClassVar[bool]
    def check(self, config: Settings) -> None: ...
    def law(self) -> SamplingParams: ...
    def source(self) -> str: ...
    def comparing(self, prompt: np.ndarray, horizon: int, key: Key,
                  answer_of: Callable[[np.ndarray], Hashable]) -> Chain: ...
    def width(self) -> int: ...
    def reads_rows(self) -> bool: ...
    def rejects_early(self) -> bool: ...
    def expected_cost(self, length: float, horizon: int) -> ExpectedCost | None: ...


class PotentialPart(Part, Protocol):
    """`potential`."""

    beta: float
    bounds: ClassVar[tuple[float, float] | None]
    stop_at_max: bool
    def start(self, config: Settings) -> Any: ...


class DecoderPart(Part, Protocol):
    """`decoder`."""

    def speculation(self, drafter: Drafter | None) -> Speculation | None: ...


class ProbePart(Part, Protocol):
    """`probe`."""

    reads_blend: ClassVar[bool]
    def draws_answers(self) -> bool: ...
    def sources(self) -> tuple[str, ...]: ...


class DatasetPart(Part, Protocol):
    """`dataset`."""

    max_new_tokens: int
    must_end: bool
    stop: list[str]
    def is_unread(self, config: Settings) -> bool: ...
    def num_chosen(self) -> int: ...
    def problems(self) -> list[Problem]: ...
    def prompting(self) -> Prompting: ...


class GraderPart(Part, Protocol):
    """`grader`."""

    judges: ClassVar[bool]
    runs_answers: ClassVar[bool]
    def start(self) -> GradingPool: ...


class HardwarePart(Protocol):
    """`hardware`."""

    memory_gb: float | None
    num_slots: int | None
    tokens_per_second: float | None
    def found(self) -> str: ...
    def options(self) -> Options: ...
    def resolve(self) -> str: ...
    def set_threads(self, small: bool = False) -> None: ...


class EnginePart(Part, Protocol):
    """`engine`."""

    calls_functions: ClassVar[bool]
    rounds_otherwise: ClassVar[bool]
    is_remote: ClassVar[bool]
    takes_potential: ClassVar[bool]
    def start(self, config: Settings, target: Any, prompt_length: int, num_chains: int,
              second: Mapping[bytes, np.ndarray] | None = None) -> ChainRunner: ...


class Settings(Protocol):
    """One run."""

    name: str
    seed: int
    num_chains: int
    dry_run: bool
    @property
    def paths(self) -> Any: ...
    assumed: Assumed
    @property
    def model(self) -> ModelPart: ...
    @property
    def draft(self) -> DraftPart: ...
    @property
    def blend(self) -> BlendPart: ...
    @property
    def sampler(self) -> SamplerPart: ...
    @property
    def potential(self) -> PotentialPart: ...
    @property
    def decoder(self) -> DecoderPart: ...
    @property
    def probe(self) -> ProbePart: ...
    @property
    def dataset(self) -> DatasetPart: ...
    @property
    def grader(self) -> GraderPart: ...
    @property
    def hardware(self) -> HardwarePart: ...
    @property
    def engine(self) -> EnginePart: ...


def groups_of(config: Settings) -> tuple[str, ...]:
    """The groups that the outputs depend on, for the probe or for samples."""
    blend = ("blend",) if config.probe.reads_blend and not config.blend.is_null else ()
    sources = config.probe.sources()
    potential = ("potential",) if "sampler" in sources and not config.potential.is_null else ()
    return (*sources, *blend, *potential, *(("engine",) if config.engine.rounds_otherwise else ()))
