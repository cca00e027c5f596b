"""Runs chains on a server: operations become requests, many at once, and the replies become answers."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from dflash_mcmc.engine.api.endpoint import OURS, DrawnReply, Endpoint, Refusal, WrongReply
from dflash_mcmc.engine.batching.chains import LiveChain, RequestPart
from dflash_mcmc.engine.delegated.elsewhere import DelegatedRunner, LiveChains, UnloadedTarget
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.ops import Draw, Operation, SamplingParams, Score
from dflash_mcmc.process import bars
from dflash_mcmc.rng import Key
from dflash_mcmc.types import Trajectory

_WAIT_SECONDS = 0.2
"""Time after which the caller is asked for more chains, and for requested stops, whatever is under way."""
_SEED_BITS = 31
"""Every server takes seeds of so many bits."""


def seed_of(key: Key, length: int) -> int:
    """The seed of a request that goes on after `length` generated tokens. A retry has the same one: with another, answers that
    take longer than the server's or the client's limits would be drawn again until they are short."""
    return int.from_bytes(key.fold_in("request", length).digest[:4], "big") % 2**_SEED_BITS


class ApiEngine(DelegatedRunner):
    """Runs chains of operations on an endpoint.

    Args:
        model: the target, whose weights the server has.
        endpoint: asks the server.
        logprobs: what the server's log probabilities are; see the component.
        num_requests: requests at once.
        num_chains: chains in progress at once.
    """

    def __init__(self, model: UnloadedTarget, endpoint: Endpoint, logprobs: str, num_requests: int, num_chains: int):
        super().__init__(num_chains)
        self.model, self._endpoint, self._logprobs = model, endpoint, logprobs
        self._threads = ThreadPoolExecutor(num_requests, thread_name_prefix="endpoint")

    def close(self) -> None:
        """Ends the requests in progress. What they would have given is counted nowhere."""
        self._endpoint.stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._asked.clear()

    def _step(self, run: LiveChains) -> None:
        """Waits until a request ends, or a short time, and gives the chains their answers."""
        started, live = time.perf_counter(), len(run.chains)
        works = [chain.work for chain in run.chains if chain.work is not None and chain.waits]
        if self._asked or works:
            wait([*self._asked, *works], _WAIT_SECONDS, FIRST_COMPLETED)
        ended = [future for future in self._asked if future.done()]
        bars.drew(len(ended))
        self._meter.count_steps(1, len(ended), 0, started)
        self._meter.share(started, live)
        for future in ended:
            part = self._asked.pop(future)
            try:
                answer = future.result()
            except WrongReply as wrong:
                run.end(part, None, f"the server gave {wrong}")
                continue
            except (ConfigError, Refusal) as error:
                run.fail(part.chain, error)
                continue
            self._charge(part, answer)
            run.end(part, answer)

    def _abort(self, requests: list[Future[Trajectory]]) -> None:
        """Takes out requests. Those that are under way end without effect."""
        for future in requests:
            future.cancel()
            del self._asked[future]

    def _begin(self, chain: LiveChain) -> None:
        """Sends the operations of a chain's new request, but for those that are answered without the server."""
        for part in chain.parts:
            if part.operation.stop is not None:
                raise ValueError("engine=api has no operations with stop strings of their own")
            if part.prepare(skip_identical=False):
                self._asked[self._threads.submit(self._answer, part.operation, part.base)] = part

    def _charge(self, part: RequestPart, answer: Trajectory) -> None:
        """Charges what a server with a cache of prefixes evaluates: a chain's prompt once, and each token drawn or scored."""
        chain, count, drawn = part.chain, answer.length - part.base.length, isinstance(part.operation, Draw)
        again = count if drawn and self._scores_again(part.operation.params) else 0
        first = part is chain.parts[0] and not chain.cost.target_forwards
        prompt = len(part.base.prompt) - 1 if first else 0
        part.charge(tokens_drawn=count if drawn else 0, target_forwards=count if drawn else 1,
                    token_forwards=prompt + count + again, prompt_forwards=prompt)

    def _scores_again(self, law: SamplingParams) -> bool:
        """Whether the tokens of a draw are scored for log p, since the server tells log q of its law alone."""
        return self._logprobs == "processed" and law != SamplingParams() and self._endpoint.kind != OURS

    def _answer(self, operation: Operation, base: Trajectory) -> Trajectory:
        """The answer to an operation, in a thread of its own. Raises UserError, and WrongReply."""
        law, none = operation.params, SamplingParams()
        if isinstance(operation, Score):
            return self._scored(operation, base)
        self._endpoint.check_law(law, self.model.vocab_size)
        top = (law.top_k or self.model.vocab_size) if self._logprobs == "top" and law.temperature and law != none else 0
        stop = () if self.model.stop_strings is None else self.model.stop_strings.strings
        most = operation.horizon - base.length
        reply = self._endpoint.drawn(base.sequence, most, law, seed_of(operation.key, base.length), top, self.model.stop_ids,
                                     stop)
        if reply.ids.min() < 0 or reply.ids.max() >= self.model.vocab_size:
            raise WrongReply(f"token id {reply.ids.max()}, which model.path does not know")
        count, ended = self._end(base, reply, most)
        tokens, values = reply.ids[:count], reply.values[:count]
        if law == none:
            log_p = log_q = values
        elif reply.log_q is not None:
            log_p, log_q = values, reply.log_q[:count]
        else:
            log_q = np.zeros(count) if not law.temperature else values if self._logprobs == "processed" else (
                self._law_of(reply, count, law))
            log_p = values if not self._scores_again(law) else (
                self._endpoint.scored(np.concatenate([base.sequence, tokens]), count)[0])
        return base.extended(tokens, log_p, log_q, np.zeros((count, 2)), ended)

    def _end(self, base: Trajectory, reply: DrawnReply, most: int) -> tuple[int, bool]:
        """The number of tokens up to the first that ends the answer, or all, and whether it has ended. Raises UserError."""
        for count in range(1, len(reply.ids) + 1):
            if self.model.ends(np.concatenate([base.tokens, reply.ids[:count]])):
                return count, True
        if len(reply.ids) < most:
            why = ("its context is full" if reply.reason == "length" else
                   f"token {reply.ids[-1]} is no stop id of model.path's files")
            raise Refusal(f"engine.url: the server ended an answer after {len(reply.ids)} of {most} tokens, and {why}; "
                          "allowed: a server that returns the stop id it has drawn and has room for dataset.max_new_tokens, "
                          "and the files of the same model")
        return len(reply.ids), False

    def _law_of(self, reply: DrawnReply, count: int, law: SamplingParams) -> np.ndarray:
        """log q of tokens from the lists of the most likely ones, float64 (count,). Raises WrongReply for one outside.

        The law has no penalty and keeps no token outside of the lists, so that they alone are processed.
        """
        log_q, none = np.full(count, -np.inf), np.empty(0, np.int64)
        for place, (token, top) in enumerate(zip(reply.ids[:count], reply.top, strict=False)):
            row = top[np.argsort(top[:, 0])]  # ties are kept in the order of ids
            if row[0, 0] < 0 or row[-1, 0] >= self.model.vocab_size or len(row) < (law.top_k or self.model.vocab_size):
                raise WrongReply("lists of the most likely tokens without their ids, or shorter than sampler.top_k")
            if token in row[:, 0]:
                log_q[place] = exact_law.process(row[:, 1], law, none, none)[row[:, 0] == token][0]
        if not np.isfinite(log_q).all():
            raise WrongReply("a token that is not among those that the law keeps")
        return log_q

    def _scored(self, operation: Score, base: Trajectory) -> Trajectory:
        """Given tokens with their log p. Their law is p itself, or the most likely token (temperature 0)."""
        greedy, count = operation.params.temperature == 0.0, len(operation.tokens)
        if not greedy and operation.params != SamplingParams():
            raise ConfigError("sampler", "one that scores tokens under a proposal's law", "another with engine=api, or "
                              "engine=slots")
        log_p, best = self._endpoint.scored(np.concatenate([base.sequence, operation.tokens]), count, greedy)
        log_q = np.where(best, 0.0, -np.inf) if greedy else log_p
        return base.extended(operation.tokens, log_p, log_q, np.zeros((count, 2)),
                             self.model.ends(np.concatenate([base.tokens, operation.tokens])))
