"""Any OpenAI-style completions endpoint: vLLM, SGLang or llama.cpp on other machines, or this package's own server.

An endpoint is audited before its first token is believed: is what it says of its tokens what is stated of it? The checks need
no weights. A fault ends the run with the line that says which field to state.
"""

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dflash_mcmc.components import Need, Settings, identity, name_of, register, runtime
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.engine import DelegatedEngine
from dflash_mcmc.engine.api.endpoint import OURS, OWN_FIELDS, DrawnReply, Endpoint, Refusal, WrongReply
from dflash_mcmc.engine.batching.interface import ChainRunner
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process.http import check_url

if TYPE_CHECKING:
    from dflash_mcmc.engine.delegated.elsewhere import UnloadedTarget

_REQUESTS = 16
"""Requests at once where `hardware.num_slots` is null."""


@register("engine", "api")
@dataclass(slots=True, kw_only=True)
class Api(DelegatedEngine):
    """A server that draws suffixes and tells their log probabilities; model.path has the tokenizer alone."""

    takes_potential: ClassVar[bool] = True
    is_remote: ClassVar[bool] = True
    needs = (*(Need(f"{group}.is_null", why=", or engine=slots, which reads layers and runs drafts")
               for group in ("probe", "blend", "draft", "decoder")),)

    url: str | None = runtime(None, "endpoint, such as http://127.0.0.1:8000/v1; prompts are sent there")
    model: str | None = runtime(None, "name of the model, as the endpoint knows it; null takes the first one; the name is "
                                "part of the identity, with that of the server")
    logprobs: Literal["raw", "processed", "top"] = identity(
        "raw", "what the server's log probabilities are: raw = those of the model, at any temperature; processed = those of "
        "the law that it draws from (vLLM's logprobs_mode, SGLang), so that a second request scores the tokens; top = raw, "
        "and a proposal's follow from lists of sampler.top_k tokens (llama.cpp)")
    body: Any = identity(None, "further fields of each request for tokens, such as {ignore_eos:false}")
    audit: bool = identity(True, "check the server before its first token is believed; false stands in the report")
    api_key_env: str | None = runtime(None, "variable of the environment with the API key, which is never stored; null sends "
                                      "none")
    timeout_seconds: float = runtime(600.0, "limit on one request", gt=0)
    patience_seconds: float = runtime(600.0, "time from a request's first failure in which it is sent again after 429, 5xx, "
                                    "resets and timeouts", gt=0)

    def check(self, config: Settings) -> None:
        """Checks the URL, and that no part needs more than drawn tokens and their log probabilities. Raises ConfigError."""
        check_url("engine.url", self.url)
        if not (self.body is None or isinstance(self.body, dict)):
            raise ConfigError("engine.body", self.body, "null, or a mapping such as {ignore_eos:false}")
        if taken := [name for name in self.body or () if name in OWN_FIELDS]:
            raise ConfigError("engine.body", ", ".join(taken), "fields that a request does not set itself, such as "
                              "ignore_eos; the sampler's fields state its law")
        instead = "with engine=api, or engine=slots"
        if config.model.rope_override() is not None:
            raise ConfigError("model.rope_scaling", config.model.rope_override(), f"null {instead}: the server's own holds")
        if config.sampler.needs_draft or config.sampler.source() == "draft":
            raise ConfigError("sampler", name_of(config.sampler), f"one without a draft {instead}")
        if config.sampler.reads_rows():
            raise ConfigError("sampler", name_of(config.sampler), "one that needs log p of its own tokens alone, without "
                              f"cut=entropy and sampling_mask, {instead}, which has every logit")

    def fingerprint(self) -> str:
        """The server and the model, as the server names them. Raises UserError for a server that cannot be reached."""
        endpoint = Endpoint(self)
        return f"{endpoint.kind} {endpoint.model}"

    def load(self, config: Settings, device: str) -> "UnloadedTarget":
        """The tokenizer and the stop ids of model.path; the weights are the server's. Raises UserError."""
        from dflash_mcmc.engine.delegated import elsewhere

        files = config.model.files(weights=False)
        if files is None:
            raise UserError("model: given a model that is loaded already; allowed: the folder or the hub name of a tokenizer "
                            "and config.json with engine=api, or engine=slots")
        target = elsewhere.read(files.folder, "auto", "cpu", config.model.tokenizer())
        limits = [limit for limit in (target.max_positions, Endpoint(self).longest) if limit]
        return target._replace(max_positions=min(limits, default=None))

    def start(self, config: Settings, target: "UnloadedTarget", prompt_length: int, num_chains: int,
              second: Mapping[bytes, np.ndarray] | None = None) -> ChainRunner:
        """Requests to the server, which is audited first. Raises UserError for a server that is not what is stated."""
        from dflash_mcmc.engine.api.session import ApiEngine

        endpoint, law, width = Endpoint(self), config.sampler.law(), config.sampler.width()
        endpoint.check_law(law, target.vocab_size)
        slots = config.hardware.num_slots or _REQUESTS
        if self.audit:
            audited(endpoint, config, target, self.logprobs, slots)
        else:
            note("engine.audit=false: what the server says of its tokens is believed without a check")
        return ApiEngine(target.stopping_at(config.dataset.stop), endpoint, self.logprobs, slots, max(1, slots // width))


_QUESTION = "Write a short story about a number that nobody has heard of."
_ANSWERS, _LENGTH = 8, 64
"""Answers at each of two temperatures, and their longest length in tokens."""
_HOT = SamplingParams(temperature=2.0)
"""A law under which tokens that a server cuts off by itself would be drawn often."""
_LISTED, _FEW = (100, 20, 5, 1), 5
"""Lengths of the lists of most likely tokens that are tried; servers have limits of their own."""
_OFF = 0.05
"""The mean distance a token of two log probabilities that should be equal, in nats, above which one is wrong. Reading and
drawing in bfloat16 differ by a tenth of it."""
_SUM = 0.01
"""What rounding may add to the sum of a token's probabilities."""
_STRENGTHS = np.array([0.2, 1.0, 4.0])
"""The strengths of bets, in nats, that a listed token is drawn too often."""
_EVIDENCE = 1e4
"""The evidence against an untruncated law that is enough: a right server reaches it once in so many audits (Ville 1939)."""
_ROUNDED = 1e-6
"""Nats by which two statements of one log p may differ."""
_EQUAL = 1e-4
"""Nats of difference between reading and drawing a token that are no evidence for either sign."""
_done = set[tuple[object, ...]]()
"""The audits that have passed in this process."""


def audited(endpoint: Endpoint, config: Settings, target: "UnloadedTarget", logprobs: str, num_requests: int) -> None:
    """Audits a server once for all runs of this process. Raises UserError with the first fault."""
    name = (endpoint.url, endpoint.kind, endpoint.model, repr(endpoint.body), logprobs, target.folder)
    if name in _done:
        return
    text = config.model.render(target.tokenizer, Conversation.of(_QUESTION))
    prompt = target.encode(text, not config.model.chat)
    if target.max_positions is not None and len(prompt) + _LENGTH > target.max_positions:
        prompt = prompt[: max(1, target.max_positions - _LENGTH)]
    with ThreadPoolExecutor(num_requests, thread_name_prefix="audit") as threads:
        try:
            _check(endpoint, target, prompt, logprobs, threads)
        except BaseException as error:
            endpoint.stopped.set()  # a stop does not wait for replies
            if not isinstance(error, WrongReply):
                raise
            raise UserError(f"engine.audit: the server gives {error}; allowed: an OpenAI-style server whose replies have "
                            "token ids and the log probability of each") from error
    _done.add(name)


def _check(endpoint: Endpoint, target: "UnloadedTarget", prompt: np.ndarray, stated: str, threads: ThreadPoolExecutor) -> None:
    """Raises UserError for the first fault. `stated`: what log probabilities are said to be."""
    top = _listed(endpoint, prompt)

    def draws(law: SamplingParams, seeds: Sequence[int]) -> list[DrawnReply]:
        return list(threads.map(lambda seed: endpoint.drawn(prompt, _LENGTH, law, seed, top, target.stop_ids), seeds))

    def scored(reply: DrawnReply) -> np.ndarray:
        return endpoint.scored(np.concatenate([prompt, reply.ids]), len(reply.ids))[0]

    plain, hot = draws(SamplingParams(), range(_ANSWERS)), draws(_HOT, range(_ANSWERS))
    again = draws(_HOT, [0])[0]
    for reply in (*plain, *hot):
        if reply.ids.min() < 0 or reply.ids.max() >= target.vocab_size:
            raise ConfigError("model.path", str(target.folder), f"the files of the model that the server runs: it has drawn "
                              f"token {reply.ids.max()}, and they have {target.vocab_size}")
    _check_text(target, [*plain, *hot])
    _check_lists(plain)
    _check_seeds(hot, again)
    try:
        read = list(threads.map(scored, plain))
    except Refusal:
        read = None
        note("engine.audit: this server scores no given tokens (echo with logprobs): log p is checked by its own lists alone")
    if read is not None and (off := _distance(plain, read)) > _OFF:
        raise _wrong("a server whose log p of the tokens that it draws is that of the same tokens when they are given: they "
                     f"differ by {off:.2g} nats a token at temperature 1 (a draft's tokens stated with log p 0, or penalties "
                     "or another temperature that the server sets by itself)")
    if read is not None:
        raw = _distance(hot, list(threads.map(scored, hot))) <= _OFF
    else:
        cold, warm = (np.sort(endpoint.drawn(prompt, 1, law, 0, top).top[0][:, 1])[: -_FEW - 1 : -1]
                      for law in (SamplingParams(), _HOT))
        raw = float(np.abs(cold - warm).mean()) <= _OFF
    if not raw and read is None:
        raise ConfigError("engine.logprobs", stated, "a server that states raw log p, or scores given tokens: the log p of "
                          "this one is that of the law that it draws from, so that the model's is not known")
    if raw == (stated == "processed"):
        raise ConfigError("engine.logprobs", stated, f"{'raw or top' if raw else 'processed'}: log p of a draw at temperature "
                          f"2 is {'that' if raw else 'not that'} of the model at temperature 1")
    if raw:
        _check_untruncated(hot)
    elif read is not None:
        _check_unshifted(plain, read)


def _listed(endpoint: Endpoint, prompt: np.ndarray) -> int:
    """The length of the longest list of most likely tokens that the server tells."""
    for top in _LISTED[:-1] if endpoint.kind != OURS else ():
        with contextlib.suppress(Refusal):
            endpoint.drawn(prompt, 1, SamplingParams(), 0, top)
            return top
    return _LISTED[-1]


def _wrong(allowed: str) -> ConfigError:
    return ConfigError("engine.url", "a server whose audit is red", allowed)


def _check_text(target: "UnloadedTarget", replies: Sequence[DrawnReply]) -> None:
    """The text of most answers must be that of their ids."""
    def bare(text: str) -> str:
        return "".join(text.replace("\ufffd", "").split())

    other = [reply for reply in replies if reply.text and bare(reply.text) != bare(target.decode(reply.ids))]
    if 2 * len(other) > len(replies):
        raise ConfigError("model.path", str(target.folder), "the tokenizer of the model that the server runs: ids whose text "
                          f"is {other[0].text[:40]!r} there are {target.decode(other[0].ids)[:40]!r} here")


def _check_lists(replies: Sequence[DrawnReply]) -> None:
    """The sum rule, and that a token has the log p that the list of its place gives it."""
    for reply in replies:
        for place, (token, value, row) in enumerate(zip(reply.ids, reply.values, reply.top, strict=False)):
            own = row[row[:, 0] == token, 1] if (row[:, 0] >= 0).all() else row[np.abs(row[:, 1] - value) < _OFF, 1]
            others = row[row[:, 0] != token, 1] if (row[:, 0] >= 0).all() else row[1:, 1]
            if (len(own) and abs(own[0] - value) > _OFF) or (not len(own) and value > row[:, 1].min() + _OFF):
                raise _wrong(f"a server that gives a token the log p of its own list of most likely tokens: token {place} has "
                             f"{value:.3g}, and the list {row[:, 1].max():.3g} at most (a draft's tokens stated with log p 0)")
            total = np.exp(others).sum() + np.exp(value) if len(own) else np.exp(row[:, 1]).sum() + np.exp(value)
            if total > 1.0 + _SUM:
                raise _wrong("a server whose probabilities of a token's place sum to at most 1: those of token "
                             f"{place} and of the most likely ones sum to {total:.3f}")


def _check_seeds(hot: Sequence[DrawnReply], again: DrawnReply) -> None:
    if len({reply.ids.tobytes() for reply in hot}) == 1:
        raise _wrong(f"a server that draws: {len(hot)} answers at temperature 2 with different seeds are equal (it ignores "
                     "seeds, or temperature)")
    if again.ids.tobytes() != hot[0].ids.tobytes():
        note("engine.audit: the server gives other tokens for the same seed: a sample that is drawn again is another one")


def _distance(replies: Sequence[DrawnReply], read: Sequence[np.ndarray]) -> float:
    """The mean distance of the stated log p from that of the same tokens when they are given, in nats a token."""
    return float(np.abs(np.concatenate([reply.values for reply in replies]) - np.concatenate(read)).mean())


def _check_untruncated(hot: Sequence[DrawnReply]) -> None:
    """Whether the tokens of the lists, or the most likely ones, are drawn at temperature 2 more often than without any cut.

    With m the mass of a list at temperature 1 and p its smallest probability, the tokens outside have together at least
    (1 - m) p^(1/T - 1) at temperature T, since none of them is likelier than p.
    """
    drawn, shares, power = list[np.ndarray](), list[np.ndarray](), 1.0 / _HOT.temperature
    for reply in hot:
        for value, row in zip(reply.values, reply.top, strict=False):
            p = np.exp(row[:, 1])
            inside, outside = (p**power).sum(), max(0.0, 1.0 - p.sum()) * p.min() ** (power - 1.0)
            shares.append(np.array([inside, p.max() ** power]) / (inside + outside))
            drawn.append(value >= np.array([row[:, 1].min(), row[:, 1].max()]) - _ROUNDED)
    _bet(np.array(drawn), np.array(shares), "it draws too few unlikely tokens at temperature 2")


def _check_unshifted(plain: Sequence[DrawnReply], read: Sequence[np.ndarray]) -> None:
    """Whether log p of the law at temperature 1 is above that of the model more often than below, as under any cut.

    A cut divides by the mass that it keeps; rounding, in reading and in drawing, goes both ways.
    """
    above = np.concatenate([reply.values for reply in plain]) - np.concatenate(read)
    above = above[np.abs(above) > _EQUAL, None] > 0.0
    _bet(above, np.full(above.shape, 0.5), "its log p of tokens that it draws at temperature 1 is above that of the model")


def _bet(drawn: np.ndarray, shares: np.ndarray, fault: str) -> None:
    """Bets that events happen more often than in these shares of the cases, both (cases, events). Raises ConfigError."""
    wealth = (drawn[..., None] * _STRENGTHS - np.log1p(shares[..., None] * np.expm1(_STRENGTHS))).sum(0)
    evidence = float(np.exp(np.minimum(wealth, 700.0)).mean())
    if evidence > _EVIDENCE:
        raise ConfigError("engine.body", "nothing for it", "the field that turns off the top-k, top-p, min-p or temperature "
                          f"which the server sets by itself: {fault} (evidence {evidence:.1g}); or the same cut stated as the "
                          "law, in sampler.top_k, top_p or min_p")
