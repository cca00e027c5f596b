"""The model `dflash_mcmc` of lm_eval: all requests of a call run in one continuous batch. Needs the package lm_eval."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dflash_mcmc.api import LoadedEngine
from dflash_mcmc.api.workers import AnswerRequest
from dflash_mcmc.dataset.inputs.conversations import template_at
from dflash_mcmc.engine.batching.prompt_encoder import ids_of
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.harness import chosen
from dflash_mcmc.harness.lm_eval.requests import NO_CACHE, GenerationSettings, request

_NO_LIMIT = 2048
"""`max_length` of a model without a limit, as in lm_eval."""


@register_model("dflash_mcmc")
class DflashMcmcLM(TemplateLM):
    """`--model dflash_mcmc --model_args pretrained=FOLDER,condition=ps,sampler.alpha=4`.

    Token ids of prompts and answers are those of lm_eval's own `hf` model. An answer ends at a stop id of the model, at a text
    of `until`, or at `max_gen_toks`. Log likelihoods are those of the (blended) target at temperature 1.

    Args:
        max_length: longest context of a log likelihood, in tokens; None takes the model's positions but one.
        enable_thinking: given to the chat template; None gives nothing.
        batch_size, max_batch_size: have no effect: `hardware.num_slots` is the number of chains in progress.
        device: has no effect, since lm_eval's command line gives one unasked: `hardware.device` is the device.
        fields: `pretrained`, and groups and fields of a run (`arguments.chosen`).

    Raises:
        UserError: for arguments that a run refuses, with its message.
    """

    def __init__(self, *, max_length: int | None = None, enable_thinking: bool | None = None, batch_size: Any = None,
                 max_batch_size: Any = None, device: str | None = None, **fields: Any):
        super().__init__()
        self._args = chosen(fields, ("pretrained", "max_length", "enable_thinking"), "model_args")
        config = self._args.config
        self._engine = LoadedEngine(config.model, engine=config.engine, hardware=config.hardware)
        self.tokenizer = config.model.tokenizer()
        self._template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if max_length is not None and not 0 < max_length <= self._most:
            raise ConfigError("max_length", max_length, f"1 to {self._most}")
        self.max_length = max_length or self._most

    @cached_property
    def _positions(self) -> int:
        positions = self._engine.max_positions
        return _NO_LIMIT if positions is None else positions

    @property
    def _most(self) -> int:
        return self._positions - 1  # the engine holds the last token of a pair too

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none, as in lm_eval's `hf` model."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm_eval keeps prompts that are made already."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids as in lm_eval's `hf` model: with special tokens, and with the first of them once."""
        return ids_of(self.tokenizer, string, add_special_tokens is not False)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuses the cache of `use_cache`. Raises UserError."""
        raise UserError(f"use_cache: given a file of answers; allowed: none, {NO_CACHE}")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Without a generation prompt its last message is continued. Raises UserError."""
        options = {"add_generation_prompt": add_generation_prompt, **self._template,
                   "chat_template": template_at(self._args.config.model.date, self.tokenizer)}
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, continue_final_message=not add_generation_prompt, **options)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers, in the order of the requests, which share a batch whatever their generation_kwargs are.

        With an engine that has one set of stop strings, requests with the same `until` share a batch.
        """
        settings: dict[str, GenerationSettings] = {}
        asked = []
        for name, instance in zip(_names(requests), requests, strict=True):
            kwargs = json.dumps(instance.args[1], sort_keys=True)
            if kwargs not in settings:
                settings[kwargs] = request(self._args, instance.args[1])
            how = settings[kwargs]
            tokens = np.asarray(self._context(instance.args[0], how), np.int64)
            asked.append(AnswerRequest(name, tokens, how.sampler, how.max_new_tokens, tuple(how.stop)))
        answers, config = [""] * len(requests), self._args.config
        with closing(self._engine.stream_each(asked, blend=config.blend, decoder=config.decoder, draft=config.draft,
                                              seed=config.seed, progress=not disable_tqdm)) as stream:
            for sample in stream:
                if sample.failure:
                    raise UserError(f"request {sample.id}: cannot be drawn: {sample.failure}")
                answers[sample.prompt] = sample.text
                self.cache_hook.add_partial("generate_until", requests[sample.prompt].args, sample.text)
        return answers

    def _context(self, text: str, how: GenerationSettings) -> list[int]:
        """The token ids of a prompt. Its beginning is left out where it and the answer do not fit the model's positions."""
        room = min(self.max_length + 1, self._positions) - how.max_new_tokens
        if room < 1:
            raise ConfigError("generation_kwargs.max_gen_toks", how.max_new_tokens, f"at most {room + how.max_new_tokens - 1}")
        tokens = self.tok_encode(text)
        if len(tokens) > room:
            note(f"lm_eval: the beginning of a prompt of {len(tokens)} tokens is left out; {room} fit before "
                 f"{how.max_new_tokens} new tokens")
        return tokens[-room:]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The token ids of a context and its continuation, which is encoded alone where a token spans their join.

        lm_eval would leave that token out, and with it the beginning of the continuation.
        """
        before, after = super()._encode_pair(context, continuation)
        own = context.rstrip() or context
        continuation = context[len(own):] + continuation
        if before + after == self.tok_encode(own + continuation):
            return before, after
        line, joined = (self.tok_encode(text, add_special_tokens=False) for text in ("\n", f"\n{continuation}"))
        alone = joined[len(line):] if joined[:len(line)] == line else self.tok_encode(continuation, add_special_tokens=False)
        return before, alone

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log likelihoods of whole texts, in nats, in windows of `max_length` tokens."""
        windows, owners = [], []
        for index, asked in enumerate(requests):
            for window in get_rolling_token_windows(self.tok_encode(asked.args[0]), self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm), strict=True):
            totals[owner] += log_p
        for asked, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", asked.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False,
                              **_: Any) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether greedy decoding gives it) of each continuation."""
        if not requests:
            return []
        config = self._args.config
        prompts: list[list[int]] = []
        for _key, context, answer in requests:
            if len(answer) > self.max_length:
                raise ConfigError("max_length", f"a continuation of {len(answer)} tokens", f"at most {self.max_length}")
            prompts.append(context[-(self.max_length + 1 - len(answer)):])
        scores = self._engine.score(prompts, [asked[2] for asked in requests], blend=config.blend, draft=config.draft,
                                    progress=not disable_tqdm)
        results = [(sum(scored.log_p), scored.is_greedy) for scored in scores]
        for asked, result in zip(requests, results, strict=True):
            if (key := asked[0]) is not None:  # the windows of a text are no requests of their own
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results


def _names(requests: Sequence[Instance]) -> list[str]:
    """A name of each request, which its random numbers depend on: task, document, number, and the repeat after the first."""
    seen: Counter[str] = Counter()
    names = []
    for asked in requests:
        name = f"{asked.task_name}/{asked.doc_id}/{asked.idx}"
        names.append(name if not seen[name] else f"{name}/{seen[name]}")
        seen[name] += 1
    return names
