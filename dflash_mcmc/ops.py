"""The operations of an engine, `Draw` and `Score`. A sampler is a generator that yields operations and receives answers.

Several operations of a chain that do not depend on each other are yielded as one `Together`.

    def chain(self, prompt, horizon, key):
        trajectory = yield Draw(Trajectory.start(prompt), horizon, SamplingParams(temperature=0.5), key)
        return ChainResult(trajectory)

Engines: `engine/batching/batched.py` runs many chains at once, `tests/reference.py` runs one forward per token without
a cache, and `engine/oracle/tabular.py` has a toy model whose random choices are enumerated.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from dflash_mcmc.rng import Key
from dflash_mcmc.types import ChainResult, Trajectory

SMALLEST, LARGEST = 1e-6, 1e6
"""Bounds of temperatures, powers and repetition penalties. Between them processed logits are finite in float32."""
PENALTY = 100.0
"""Bound on the size of frequency and presence penalties, in nats. The APIs that define them allow 2."""


UNENDED = 2.0**30
"""Nats of log p that an answer without an end loses in `ended_only`. exp(-UNENDED) is 0 in float64. The number is finite, so
that two such answers can be compared; a sum with it is rounded to 2e-7 nats."""


CUTS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "typical_p": 1.0}
"""The parameters that decide which tokens are kept, with the values that keep all."""


LawFunction: TypeAlias = Callable[[Any, np.ndarray], Any]
"""From the target's float32 logits (vocabulary,), a tensor that it may change, and the ids before the token, int64 (n,), to
log weights (vocabulary,), -inf for a token that cannot be drawn. It is called again for the same token, so it has no state."""


class SamplingParams(NamedTuple):
    """How a token is drawn from logits. The order is: penalties, temperature, top-n-sigma, top-k, typical, top-p, min-p.

    With `temperature_last` the temperature comes after all of them, as in llama.cpp and mlx-lm.

    Nothing is inherited from a model's generation_config. Ties at a cut-off are kept in the order of token ids.
    """

    temperature: float = 1.0
    """0 takes the most likely token (the smallest id among equals)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or generation (Keskar et al. 2019)."""
    frequency_penalty: float = 0.0
    """Subtract this from the logit of a token for each time that it is in the generation. The prompt does not count (the
    definition of the OpenAI API and of vLLM), unless `counts_prompt`."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens in the generation, however often they are in it."""
    counts_prompt: bool = False
    """Whether frequency and presence penalty count the tokens of the prompt too."""
    top_n_sigma: float = 0.0
    """Keep tokens whose logit is at most this many standard deviations of the row below the largest (Tang et al. 2024); 0
    keeps all."""
    typical_p: float = 1.0
    """Keep the smallest set with at least this mass of the tokens whose surprisal is nearest to the entropy (Meister et al.
    2023)."""
    temperature_last: bool = False
    """Whether the kept tokens are chosen before the temperature is applied."""
    function: LawFunction | None = None
    """The whole law of a token: the other parameters are then those of the target itself."""

    def fields(self) -> dict[str, Any]:
        """The parameters that are values, by name."""
        return {name: value for name, value in self._asdict().items() if name != "function"}

    @property
    def function_name(self) -> str:
        """The name of `function`; a partial and the like have none."""
        return getattr(self.function, "__name__", str(self.function))

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn. Penalties only change probabilities."""
        return self.temperature == 0.0 or self.function is not None or self != self.untruncated()

    def untruncated(self) -> "SamplingParams":
        """The same parameters with every token kept."""
        return self._replace(**CUTS)

    @property
    def counts_tokens(self) -> bool:
        """Whether the law depends on how often a token is in the generation."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty is on. The law of a token then depends on earlier tokens directly, and not only by the logits."""
        return self.repetition_penalty != 1.0 or self.counts_tokens

    def without_penalties(self) -> "SamplingParams":
        """The same parameters with all penalties off."""
        return self._replace(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, counts_prompt=False)


def counted_from(laws: Iterable[SamplingParams], prompt_length: int) -> int:
    """The first token of a sequence that frequency and presence penalty count. Raises ValueError if laws differ in it."""
    counting = {law.counts_prompt for law in laws if law.counts_tokens}
    if len(counting) > 1:
        raise ValueError("the laws of a draw count the prompt, and do not; allowed: laws that agree")
    return 0 if True in counting else prompt_length


class Floor(NamedTuple):
    """The threshold below which a draw may be abandoned, since it can no longer be accepted (early rejection).

    After token t of the draw, W_t is the sum of alpha * log p - log q over its tokens. The bound on the log of the
    Metropolis-Hastings ratio is b_t = W_t - reference, plus log(length / t) where `length` is given (t counts from the start
    of the generation). The engine may stop as soon as b_t + margin <= log_uniform.
    """

    log_uniform: float
    alpha: float
    reference: float
    """W of the current sequence, from the start of the draw."""
    length: int | None
    margin: float
    """A margin in nats, for rounding."""

    def weights(self, trajectory: Trajectory, start: int) -> np.ndarray:
        """W_t after each token of `trajectory` from `start` on, float64. The sum runs token by token, as on a device."""
        return np.cumsum(self.alpha * trajectory.log_p[start:] - trajectory.log_q[start:])

    def weight(self, trajectory: Trajectory, start: int) -> float:
        """W_t after the last token of `trajectory`; 0 if the draw, which starts at `start`, has none yet."""
        return float(self.weights(trajectory, start)[-1]) if trajectory.length > start else 0.0

    @property
    def threshold(self) -> float:
        """The draw may be abandoned once W_t, plus log(length / t) where `length` is given, is not above this."""
        return self.log_uniform + self.reference - self.margin

    def bound(self, weight: float, generated: int) -> float:
        """b_t for W_t = `weight` after `generated` tokens of the generation."""
        return weight - self.reference + (0.0 if self.length is None else math.log(self.length / generated))

    def crossed(self, weight: float, generated: int) -> bool:
        """Whether the draw may be abandoned."""
        # Written with `<` and the uniform on its left: an enumerated uniform supports only this comparison.
        return not self.log_uniform < self.bound(weight, generated) + self.margin


class Draw(NamedTuple):
    """Continue `trajectory` token by token, up to a stop id, a stop string or `horizon` generated tokens.

    The answer is the longer trajectory. Token number t (counted from the start of the generation) is drawn with uniform
    number t of `key`, by inverse transform over token ids. A decoder that preserves the law but not the tokens also draws
    from keys derived from `key`. With a floor the answer may be incomplete: the draw was abandoned.
    """

    trajectory: Trajectory
    horizon: int
    params: SamplingParams
    key: Key
    source: str = "blended"
    """The logits that tokens are drawn from: `blended` (the target's), `base` (without the blend) or `draft` (the draft's on
    the grid of `grid_slot`, and the target's at the anchors of blocks)."""
    along: Trajectory | None = None
    """A trajectory that begins with `trajectory`, and whose later tokens were drawn with the same parameters and source. It
    changes no answer: as long as the draw repeats its tokens, an engine does not need the target."""
    floor: Floor | None = None
    """A threshold for early rejection. It changes no answer that a sampler would accept."""
    laws: tuple[SamplingParams, ...] = ()
    """Further laws. The answer has log q and interval of each token under each of them (`Trajectory.laws`)."""
    entropy: bool = False
    """Whether the answer has the entropy of p before each token (`Trajectory.entropy`)."""
    kept: bool = False
    """Whether the answer has the tokens that `params` keep at each token (`Trajectory.kept`), at most `params.top_k`."""
    stop: tuple[str, ...] | None = None
    """The strings that end the draw; None takes those of the engine. See `stopping`."""

    def uniforms(self) -> np.ndarray:
        """Uniforms of the positions that the draw may fill, float64; greedy decoding needs none."""
        length = max(self.horizon - self.trajectory.length, 0)
        if self.params.temperature == 0.0:
            return np.full(length, 0.5)
        return self.key.uniforms(self.trajectory.length, self.trajectory.length + length)

    def until_abandoned(self, along: Trajectory) -> int:
        """Number of tokens of `along` after the draw's trajectory, up to the first one at which the draw may be abandoned."""
        start, floor = self.trajectory.length, self.floor
        if floor is None or along.length == start:
            return along.length - start
        weights = floor.weights(along, start)
        crossed = [floor.crossed(float(weight), start + num_tokens) for num_tokens, weight in enumerate(weights, start=1)]
        return crossed.index(True) + 1 if True in crossed else len(crossed)

    def is_abandoned(self, answer: Trajectory) -> bool:
        """Whether the tokens of an answer have crossed the draw's floor."""
        if self.floor is None or answer.length == self.trajectory.length:
            return False
        return self.floor.crossed(self.floor.weight(answer, self.trajectory.length), answer.length)


class Score(NamedTuple):
    """Teacher-force `tokens` after `trajectory`.

    The answer is the longer trajectory, with `log_q` under `params` and `source`.
    """

    trajectory: Trajectory
    tokens: np.ndarray
    params: SamplingParams
    source: str = "blended"
    laws: tuple[SamplingParams, ...] = ()
    """As of `Draw`."""
    entropy: bool = False
    """As of `Draw`."""
    kept: bool = False
    """As of `Draw`."""
    stop: tuple[str, ...] | None = None
    """As of `Draw`."""


class Wait(NamedTuple):
    """Wait for work outside of the engine, such as a program in a sandbox. The answer is its result; other chains go on."""

    work: Future[Any]


class Together(NamedTuple):
    """Operations that do not depend on each other. The answer is the tuple of their answers, once all are known.

    Each takes a slot of its own while slots are free, and otherwise waits. Operations that begin with the same tokens share
    their keys and values, and draws share forwards until they differ. Order and number of slots change no answer, since every
    draw has its own key.
    """

    operations: tuple[Draw | Score, ...]


def grid_slot(number: int, block_size: int) -> int:
    """The slot of generated token `number` (from 0) on the draft's absolute grid.

    Blocks start at tokens 0, B, 2B, ... of the generation, independent of where a draw starts, so that the draft's law of a
    token is a function of the sequence. The first token of a block is its anchor, slot 0, and has no law of the draft. The
    law of slot k is a function of the tokens up to the anchor.
    """
    return number % block_size


Operation: TypeAlias = Draw | Score
Request: TypeAlias = Draw | Score | Together | Wait
"""What a chain yields. A `Draw` or `Score` is answered by a Trajectory, a `Together` by a tuple of them, and a `Wait` by a
value."""
Result = TypeVar("Result")
# The type of an answer depends on the request, which the type of a generator cannot express.
Steps: TypeAlias = Generator[Request, Any, Result]
"""A part of a chain, or another generator of requests."""
Chain: TypeAlias = Steps[ChainResult]


def stopping(chain: Steps[Result], stop: tuple[str, ...]) -> Steps[Result]:
    """The chain with strings of its own. Its draws end at these strings instead of those of the engine.

    `engine=slots` and the reference engine carry out operations with strings of their own. `engine=vllm` and `engine=api` do
    not.
    """
    return _relayed(chain, lambda operation: operation._replace(stop=stop), lambda path: path)


def ended_only(chain: Steps[Result], horizon: int) -> Steps[Result]:
    """The chain on a target that has only answers which end within `horizon` tokens: log p of others is lower by `UNENDED`.

    The weight of an answer is its alpha * log p - log q, so that every sampler that weighs leaves such answers at once. A
    chain that has seen no other yet moves among them as it would without the limit.
    """
    return _relayed(chain, lambda operation: operation, lambda path: _lowered(path, horizon))


def _relayed(chain: Steps[Result], ask: Callable[[Operation], Operation],
             read: Callable[[Trajectory], Trajectory]) -> Steps[Result]:
    """The chain, with each of its operations and each answer to them replaced."""
    answer: Any = None
    with closing(chain):
        while True:
            try:
                request = chain.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Wait):
                answer = yield request
            elif isinstance(request, Together):
                answer = tuple(map(read, (yield Together(tuple(map(ask, request.operations))))))
            else:
                answer = read((yield ask(request)))


def until_ended(begin: Callable[[Key], Chain], horizon: int, key: Key, most: int = 16) -> Chain:
    """A chain of `ended_only`, which is drawn again under another key while its answer does not end, `most` times in all.

    For a sampler of independent draws this is rejection: its law, given that an answer ends. If no try ends, the result is
    the last, with a `law_error` of 1.
    """
    for number in range(most):
        result = yield from ended_only(begin(key.fold_in("again", number) if number else key), horizon)
        if result.trajectory.ended:
            return result._replace(trace=_raised(result.trace))
    path = result.trajectory
    path = path._replace(log_p=np.where(path.log_p < -UNENDED / 2, path.log_p + UNENDED, path.log_p))
    return result._replace(trajectory=path, trace=_raised(result.trace), law_error=1.0)


class Evaluated(NamedTuple):
    """What a potential says of a text."""

    value: float
    """r, or the stated value of a text on which the potential fails."""
    seconds: float
    failed: bool = False


class Tilt(NamedTuple):
    """The factor exp(beta r(x)) of a target, for the answers to one prompt."""

    beta: float
    evaluate: Callable[[np.ndarray], Future[Evaluated]]
    """Begins to compute r of an answer, given as token ids, int64."""
    bounds: tuple[float, float] | None
    """The smallest and the largest r; None where they are not known, so that no draw is abandoned."""
    stop_at_max: bool = False

    def within(self, operation: Operation) -> Operation:
        """The operation, with a floor that no answer crosses which its r can still save. An unfinished text has r = 0."""
        if not isinstance(operation, Draw) or operation.floor is None:
            return operation
        if self.bounds is None:
            return operation._replace(floor=None)
        gain = max(0.0, *(self.beta * bound for bound in self.bounds))
        return operation._replace(floor=operation.floor._replace(margin=operation.floor.margin + gain))


def tilted(chain: Steps[Any], tilt: Tilt, horizon: int) -> Steps[Any]:
    """The chain on a target with the further factor exp(beta r(x)), x a complete answer: ended, or `horizon` tokens long.

    Every answer to an operation gets its `evidence`, which its weight contains; r of an unfinished text is 0, so that the
    targets of earlier stages are p^alpha exp(beta r) on ended and p^alpha on other sequences. An answer that the chain has
    had before asks for nothing. With `stop_at_max` operations are carried out one after another, and the chain ends with the
    first answer of the largest r: its law is not that of the target.
    """
    known, answer = dict[bytes, Evaluated](), None
    with closing(chain):
        while True:
            try:
                request = chain.send(answer)
            except StopIteration as end:
                return _tallied(end.value, known) if isinstance(end.value, ChainResult) else end.value
            if isinstance(request, Wait):
                answer = yield request
                continue
            operations = tuple(map(tilt.within, request.operations if isinstance(request, Together) else (request,)))
            paths = list[Trajectory]()
            for part in ([(each,) for each in operations] if tilt.stop_at_max else [operations]):
                drawn = (yield Together(part)) if isinstance(request, Together) else ((yield part[0]),)
                works = {path.tokens.tobytes(): tilt.evaluate(path.tokens) for path in drawn
                         if _may_weigh(path, horizon) and path.tokens.tobytes() not in known}
                for name, work in works.items():
                    known[name] = yield Wait(work)
                for path in drawn:
                    found = known.get(path.tokens.tobytes()) if _may_weigh(path, horizon) else None
                    paths.append(path._replace(evidence=tilt.beta * found.value if found else 0.0))
                    if tilt.stop_at_max and found and tilt.bounds and not found.failed and found.value >= tilt.bounds[1]:
                        return _tallied(ChainResult(paths[-1]), known)
            answer = tuple(paths) if isinstance(request, Together) else paths[0]


def _may_weigh(path: Trajectory, horizon: int) -> bool:
    """Whether a potential counts for a trajectory: it is complete, and ends if it must (`ended_only`)."""
    return path.complete(horizon) and path.length > 0 and path.log_p[-1] > -UNENDED / 2


def _tallied(result: ChainResult, known: Mapping[bytes, Evaluated]) -> ChainResult:
    """The result with the potential of its answer, and what finding potentials took."""
    found = known.get(result.trajectory.tokens.tobytes())
    own = {"potential": found.value} if found else {}
    return result._replace(measures={**result.measures, **own, "potential_calls": float(len(known)),
                                     "potential_seconds": sum(each.seconds for each in known.values()),
                                     "potential_failures": float(sum(each.failed for each in known.values()))})


def _lowered(path: Trajectory, horizon: int) -> Trajectory:
    """The trajectory, with a lower log p of its last token if the horizon cuts it off and this is not done yet."""
    if path.ended or path.length < horizon or path.log_p[-1] < -UNENDED / 2:
        return path
    return path._replace(log_p=np.append(path.log_p[:-1], path.log_p[-1] - UNENDED))


def _raised(trace: tuple[dict[str, float | int | str], ...]) -> tuple[dict[str, float | int | str], ...]:
    """The entries of a trace with the log p of the model."""
    return tuple({**entry, "log_p": log_p + UNENDED} if isinstance(log_p := entry.get("log_p"), float)
                 and log_p < -UNENDED / 2 else entry for entry in trace)


def drive(chain: Steps[Result], answer: Callable[[Operation], Trajectory]) -> Result:
    """Runs one chain to its end and answers each operation immediately. Engines without a batch use it."""
    try:
        request = next(chain)
        while True:
            if isinstance(request, Wait):
                request = chain.send(request.work.result())
                continue
            request = chain.send(tuple(map(answer, request.operations)) if isinstance(request, Together) else answer(request))
    except StopIteration as stop:
        return stop.value
