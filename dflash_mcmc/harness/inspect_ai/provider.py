"""The model `dflash/...` of inspect_ai: all requests run in one continuous batch. Needs the package inspect_ai."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from rich.markup import escape

from dflash_mcmc.api import prompts as read_prompts
from dflash_mcmc.api import workers
from dflash_mcmc.api.choices import Samplers
from dflash_mcmc.api.workers import DrawnAnswer, Order
from dflash_mcmc.chains import build
from dflash_mcmc.engine.batching.prompt_encoder import id_bound
from dflash_mcmc.engine.batching.stop_strings import texts_of
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.harness import chosen
from dflash_mcmc.harness.inspect_ai import requests
from dflash_mcmc.harness.inspect_ai.requests import RequestSettings
from dflash_mcmc.options import option_files
from dflash_mcmc.rng import Key

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.stop_strings import TokenTexts

_PLAIN = ("sampler=temperature", "sampler.temperature=1")
_MOST_WAITING = 100_000


class DflashAPI(ModelAPI):
    """`--model dflash/NAME -M condition=ps -M sampler.alpha=4`, where NAME is a folder, a hub name or an option of `model`.

    Without a sampler or a condition, answers are drawn token by token at the temperature of the request, 1 if it has none, and
    greedily at temperature 0. The random numbers of an answer depend on the seed, the token ids of its prompt, and how often
    this prompt was asked before, so that epochs are different draws.

    Args:
        model_name: NAME.
        config: of all requests; `seed` is the default of `-M seed`.
        max_new_tokens: longest answer in tokens.
        max_prompt_tokens: longest prompt; None takes 1,024, or less where the model has fewer positions.
        fields: groups and fields of a run (`arguments.chosen`).

    Raises:
        PrerequisiteError: for arguments that a run refuses, with its message. inspect_ai prints it without a traceback.
    """

    def __init__(self, model_name: str, base_url: str | None = None, api_key: str | None = None,
                 config: GenerateConfig = GenerateConfig(), *,  # noqa: B008 - as in inspect_ai
                 max_new_tokens: int = 512, max_prompt_tokens: int | None = None, **fields: Any):
        super().__init__(model_name, base_url, api_key, [], config)
        try:
            self._config = self._composed(fields, max_new_tokens)
            self._samplers = Samplers(self._config)
            self._settings(config)  # what every request says is refused before a model is loaded
            self._target, self._workers, self._longest_prompt = workers.started(
                self._config, max_prompt_tokens, "max_prompt_tokens", _MOST_WAITING, lambda: None)
        except UserError as error:
            raise PrerequisiteError(escape(f"dflash: {error}")) from error
        self._asked: Counter[str] = Counter()

    def _composed(self, fields: dict[str, Any], max_new_tokens: int) -> Config:
        name = self.model_name
        if not Path(name).expanduser().is_dir() and name in option_files()["model"]:
            arguments = {"model": name, **fields}
        else:
            arguments = {"pretrained": name, **fields}
        config = chosen(arguments, ("max_new_tokens", "max_prompt_tokens"), "-M", _PLAIN).config
        config.dataset.max_new_tokens, config.dataset.stop = max_new_tokens, []
        return config

    def max_tokens(self) -> int | None:
        """Longest answer of a request that does not say it."""
        return self._config.dataset.max_new_tokens

    def max_connections(self) -> int:
        """Requests at a time: as many as the engine has slots, so that no slot waits for inspect_ai."""
        return self._config.hardware.num_slots or workers.MOST_SLOTS

    def connection_key(self) -> str:
        """Each model has an engine of its own."""
        return f"dflash/{self.model_name}/{id(self)}"

    def collapse_user_messages(self) -> bool:
        """Chat templates may demand that roles alternate."""
        return True

    def collapse_assistant_messages(self) -> bool:
        """As `collapse_user_messages`."""
        return True

    async def generate(self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice,
                       config: GenerateConfig) -> ModelOutput:
        """The answers to a conversation. A request that is cancelled leaves its slots before the engine's next step.

        Raises:
            UserError: for a request that cannot be carried out.
            NotDrawn: for one whose chain or engine has failed.
        """
        if tools and tool_choice != "none":
            raise ConfigError("tools", [tool.name for tool in tools], "none: models of dflash_mcmc have no tool calls")
        asked, whole = self._settings(config)
        tokens = self._tokens(input, whole)
        orders = list(self._orders(tokens, asked, whole))
        numbers = self._workers.order(orders)
        try:
            drawn = await asyncio.gather(*(asyncio.wrap_future(order.future) for order in orders))
        finally:
            self._workers.drop(numbers)
        return self._output(drawn, len(tokens), asked)

    def _settings(self, config: GenerateConfig) -> tuple[RequestSettings, Config]:
        asked = requests.read(config.model_dump(exclude_none=True), self._config.dataset.max_new_tokens)
        return asked, self._samplers.config_for(asked.sampler, asked.common, asked.max_tokens)

    def _tokens(self, messages: Sequence[ChatMessage], config: Config) -> np.ndarray:
        (read,) = read_prompts.by_id([[_turn(message) for message in messages]]).values()
        tokens = read_prompts.token_ids(config, self._target, "of the request", read)
        if len(tokens) > self._longest_prompt:
            raise ConfigError("input", f"a prompt of {len(tokens)} tokens", f"at most {self._longest_prompt} "
                              "(-M max_prompt_tokens=...)")
        return tokens

    def _orders(self, tokens: np.ndarray, asked: RequestSettings, config: Config) -> Iterator[Order]:
        name = hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()
        before = self._asked[name]
        self._asked[name] += asked.num_choices
        for index in range(before, before + asked.num_choices):
            key = Key(self._config.seed if asked.seed is None else asked.seed).fold_in(name, index)
            yield Order(lambda key=key: build.begun(  # type: ignore[misc]
                config, config.sampler, tokens, key, self._target), asked.stop, Future())

    def _output(self, drawn: Sequence[DrawnAnswer], prompt_tokens: int, asked: RequestSettings) -> ModelOutput:
        name, length = f"dflash/{self.model_name}", sum(answer.result.trajectory.length for answer in drawn)
        choices = [ChatCompletionChoice(message=ChatMessageAssistant(content=answer.text, model=name, source="generate"),
                                        stop_reason=requests.STOP_REASONS[answer.finish_reason],
                                        logprobs=self._logprobs(answer) if asked.logprobs else None) for answer in drawn]
        usage = ModelUsage(input_tokens=prompt_tokens, output_tokens=length, total_tokens=prompt_tokens + length)
        details = [answer.details() for answer in drawn]
        return ModelOutput(model=name, choices=choices, usage=usage, metadata={"dflash_mcmc": details})

    @cached_property
    def _texts(self) -> TokenTexts:
        return texts_of(self._target.tokenizer, id_bound(self._target.tokenizer))

    def _logprobs(self, answer: DrawnAnswer) -> Logprobs:
        path = answer.result.trajectory
        return Logprobs(content=[Logprob(token=piece.decode(errors="replace"), logprob=log_p, bytes=list(piece))
                                 for piece, log_p in zip(self._texts.shown(path.tokens.tolist()), path.log_p.tolist(),
                                                         strict=True)])

    def close(self) -> None:
        """Ends the thread after the requests that it has."""
        self._workers.close()


def _turn(message: ChatMessage) -> dict[str, Any]:
    if isinstance(message.content, list) and (other := [part.type for part in message.content if part.type != "text"]):
        raise ConfigError("input", f"content of the type {other[0]}", "text")
    return {"role": message.role, "content": message.text}
