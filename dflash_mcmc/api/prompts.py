"""Prompts from Python: texts, conversations, or token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_mcmc.config.schema import Config
from dflash_mcmc.dataset.inputs.conversations import ROLES, Conversation, is_answerable, turns_of
from dflash_mcmc.engine.batching.interface import ChainTarget
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.runner.fitting import TooLong, parted
from dflash_mcmc.tokenizer import id_bound

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""A text; a conversation, as a list of messages with `role` and `content`; or token ids, which are used as they are, in a
list, an array or a tensor."""
Prompts = Sequence[Prompt] | Mapping[str, Prompt]
"""Prompts in order, or by id."""
_ALLOWED = "texts, lists of messages with role and content, or lists of token ids"


def by_id(prompts: Prompts) -> dict[str, Conversation | np.ndarray]:
    """The prompts by id, as conversations or token ids, int64. Raises ConfigError."""
    prompts = _array(prompts)
    if _is_one(prompts):
        raise ConfigError("prompts", prompts, f"a list of {_ALLOWED}; wrap one prompt in a list, [prompt]")
    if isinstance(prompts, np.ndarray):  # a row for each prompt
        prompts = list(prompts)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, (Mapping, Sequence)) or not prompts:
        raise ConfigError("prompts", prompts, f"a list of {_ALLOWED}, or a mapping from ids to them, and at least one")
    named = prompts if isinstance(prompts, Mapping) else {f"{index:05d}": prompt for index, prompt in enumerate(prompts)}
    return {str(name): _read(prompt) for name, prompt in named.items()}


def _array(prompt: Any) -> Any:
    """A tensor of PyTorch as an array, and anything else as it is. PyTorch is not imported for this."""
    return prompt.detach().cpu().numpy() if callable(getattr(prompt, "detach", None)) else prompt


def array_of(tokens: Any) -> np.ndarray:
    """Numbers as an array, which is empty where they are none: no list, or a list of lists of different lengths."""
    tokens = _array(tokens)
    try:
        return np.asarray(tokens) if isinstance(tokens, (np.ndarray, Sequence)) else np.empty(0)
    except ValueError:
        return np.empty(0)


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of prompts: a text, one conversation, or a flat list of token ids."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if isinstance(prompts, str) or (isinstance(prompts, Mapping) and set(prompts) >= {"role", "content"}):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and (
        isinstance(prompts[0], (int, np.integer)) or (isinstance(prompts[0], Mapping) and "role" in prompts[0]))


def _read(prompt: Prompt) -> Conversation | np.ndarray:
    prompt = _array(prompt)
    if isinstance(prompt, str):
        return Conversation.of(prompt)
    if not isinstance(prompt, np.ndarray) and isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        turns = turns_of([dict(turn) if isinstance(turn, Mapping) else turn for turn in prompt])
        if turns is None or not is_answerable(turns):
            raise ConfigError("prompts", prompt, f"messages with role ({', '.join(ROLES)}) and content, a text, of "
                              "which the last is a user's")
        return Conversation(turns)
    tokens = array_of(prompt)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise ConfigError("prompts", prompt, _ALLOWED)
    return tokens.astype(np.int64)


def token_ids(config: Config, target: ChainTarget, name: str, prompt: Conversation | np.ndarray) -> np.ndarray:
    """The token ids of a prompt, int64. Raises UserError, also for a prompt that leaves too few of the model's positions."""
    return all_token_ids(config, target, {name: prompt})[0][name]


def all_token_ids(config: Config, target: ChainTarget, asked: Mapping[str, Conversation | np.ndarray],
                  ) -> tuple[dict[str, np.ndarray], dict[str, TooLong]]:
    """The token ids of the prompts that fit, and the others. Raises UserError, also if no prompt fits."""
    prompts = {name: _encoded(config, target, name, prompt) for name, prompt in asked.items()}
    room = config.dataset.max_new_tokens
    fit, too_long = parted(prompts, lambda _: room, target.max_positions)
    if fit or not too_long:
        return fit, too_long
    name, (length, _, positions) = min(too_long.items(), key=lambda item: item[1].prompt_tokens)
    if length >= positions:
        raise ConfigError("prompts", f"prompt {name} of {length} tokens", f"prompts of less than {positions} tokens, "
                          "the model's positions")
    raise ConfigError("max_new_tokens", room, f"at most {positions - length} (prompt {name} takes {length} of the model's "
                      f"{positions} positions)")


def _encoded(config: Config, target: ChainTarget, name: str, prompt: Conversation | np.ndarray) -> np.ndarray:
    """Raises UserError."""
    if isinstance(prompt, Conversation):
        tokens = target.encode(config.model.render(target.tokenizer, prompt), not config.model.chat)
    else:
        tokens, bound = prompt, min(id_bound(target.tokenizer), target.vocab_size)
        if tokens.min() < 0 or tokens.max() >= bound:
            raise ConfigError("prompts", int(tokens[(tokens < 0) | (tokens >= bound)][0]), f"token ids from 0 to {bound - 1}")
    if not len(tokens):
        raise ConfigError("prompts", f"nothing in prompt {name}", "at least one token")
    return tokens
