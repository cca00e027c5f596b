"""Prompts from Python: texts, conversations, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_mcmc.data.conversations import Conversation, is_answerable, turns_of
from dflash_mcmc.errors import ConfigError

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.inference.interface import ChainTarget

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""A text; a conversation, as a list of messages with `role` and `content`; or token ids, which are used as they are."""
Prompts = Sequence[Prompt] | Mapping[str, Prompt]
"""Prompts in order, or by id."""
_ALLOWED = "texts, lists of messages with role and content, or lists of token ids"


def by_id(prompts: Prompts) -> dict[str, Conversation | np.ndarray]:
    """The prompts by id, as conversations or token ids, int64. Raises ConfigError."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, (Mapping, Sequence)) or not prompts:
        raise ConfigError("prompts", prompts, f"a list of {_ALLOWED}, or a mapping from ids to them, and at least one")
    named = prompts if isinstance(prompts, Mapping) else {f"{index:05d}": prompt for index, prompt in enumerate(prompts)}
    return {str(name): _read(prompt) for name, prompt in named.items()}


def _read(prompt: Prompt) -> Conversation | np.ndarray:
    if isinstance(prompt, str):
        return Conversation.of(prompt)
    if not isinstance(prompt, np.ndarray) and isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        turns = turns_of([dict(turn) if isinstance(turn, Mapping) else turn for turn in prompt])
        if turns is None or not is_answerable(turns):
            raise ConfigError("prompts", prompt, "messages with role and content, both texts, of which the last is a user's")
        return Conversation(turns)
    tokens = np.asarray(prompt) if isinstance(prompt, (np.ndarray, Sequence)) else np.empty(0)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise ConfigError("prompts", prompt, _ALLOWED)
    return tokens.astype(np.int64)


def token_ids(config: Config, target: ChainTarget, prompt: Conversation | np.ndarray) -> np.ndarray:
    """The token ids of a prompt, int64. Raises UserError."""
    if isinstance(prompt, Conversation):
        return target.encode(config.model.render(target.tokenizer, prompt), not config.model.chat)
    known = len(target.tokenizer)
    if prompt.min() < 0 or prompt.max() >= known:
        wrong = int(prompt[(prompt < 0) | (prompt >= known)][0])
        raise ConfigError("prompts", wrong, f"token ids from 0 to {known - 1}")
    return prompt
