"""Engines: what runs the chains of a run. The engine of slots is part of this package, and vLLM is another package."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_mcmc.components import Component, Settings

if TYPE_CHECKING:
    import numpy as np

    from dflash_mcmc.engine.batching.interface import ChainRunner
    from dflash_mcmc.tokenizer import PromptEncoder


class Engine(Component):
    """Base class of engines. A subclass defines `load` and `start`."""

    __slots__ = ()

    group = "engine"
    plans_memory: ClassVar[bool] = True
    """Whether the memory of the engine is predicted, and refused where it does not suffice, before a start."""
    mixes_stops: ClassVar[bool] = False
    """Whether each operation can have stop strings of its own (`ops.stopping`)."""
    takes_potential: ClassVar[bool] = False
    """Whether chains can wait for work outside of the engine (`ops.Wait`), as a potential asks them to."""
    calls_functions: ClassVar[bool] = False
    """Whether the law of a token can be a function (`SamplingParams.function`)."""
    rounds_otherwise: ClassVar[bool] = False
    """Whether results can differ from those of `engine=slots` by rounding. The engine is then part of the identity."""
    is_remote: ClassVar[bool] = False
    """Whether another program has the weights. Records then say that their bits are that program's."""

    @abstractmethod
    def load(self, config: Settings, device: str) -> Any:
        """The target on a device, as `start` takes it. It has the attributes of `interface.ChainTarget`. Raises UserError."""

    def resource(self, target: Any) -> object:
        """What one run at a time can use in this process. It can be referenced weakly.

        Args:
            target: the result of `load`.
        """
        return target

    @abstractmethod
    def start(self, config: Settings, target: Any, prompt_length: int, num_chains: int,
              second: "Mapping[bytes, np.ndarray] | None" = None) -> "ChainRunner":
        """An engine that runs chains on the target. Its user closes it. Raises UserError.

        Args:
            target: the result of `load`.
            prompt_length: tokens of the longest prompt.
            num_chains: number of chains that all processes run together.
            second: the result of `Blend.second_prompts` for the prompts of these chains; None where it is not known.
        """

    def blend_width(self, blend: Any, target: Any, prompts: "Sequence[np.ndarray]") -> float | None:
        """The standard deviation of the blend's logits over that of the target's, a mean over the last tokens of prompts.

        None for a blend that taps no layer, and for an engine that cannot measure it.
        """
        return None

    def num_devices(self) -> int:
        """Devices that a process uses together for one copy of the model."""
        return 1

    def memory_note(self, config: Settings) -> str:
        """A line on the engine's memory for the table of a dry run, which is empty where `plans_memory` checks it or the
        model's configuration is not here. Raises ConfigError."""
        return ""

    def prompt_encoder(self, config: Settings) -> "PromptEncoder | None":
        """The encoder of prompts before a start; None if the model's configuration is not here. Raises UserError."""
        return config.model.prompt_encoder()


class DelegatedEngine(Engine):
    """Base class of engines whose weights another package or program loads (`delegated/elsewhere.py`)."""

    __slots__ = ()

    plans_memory: ClassVar[bool] = False
    rounds_otherwise: ClassVar[bool] = True

    def resource(self, target: Any) -> object:
        """The class: a process has one engine of vLLM, and a run has the requests of a process to itself."""
        return type(self)

    def prompt_encoder(self, config: Settings) -> "PromptEncoder | None":
        """The tokenizer, and the positions of the model without regard to sliding windows, which these engines compute."""
        from dflash_mcmc.engine.delegated import elsewhere

        return elsewhere.prompt_encoder(config.model)
