"""The target of vLLM: what is known of a checkpoint without its weights, which vLLM's workers load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.prompt_encoder import encode
from dflash_mcmc.engine.batching.stop_strings import StopStrings, texts_of
from dflash_mcmc.errors import ConfigError, UserError, reason_of
from dflash_mcmc.model.files import precision
from dflash_mcmc.model.files.stop_ids import stop_ids_of


class VllmTarget(NamedTuple):
    """A checkpoint and its tokenizer.

    Attributes:
        folder: the checkpoint.
        dtype: name of the precision of weights and activations.
        device: device name for PyTorch.
        config: the configuration of transformers, of the text model.
        max_positions: longest sequence, prompt included. A sliding window is no limit, since vLLM computes it.
        vocab_size: number of logits.
        stop_ids: all ids that end a generation, from generation_config, config and tokenizer.
        forbidden: ids without a token (padding rows of the head), which can never be drawn.
        stop_strings: strings that end a generation; None for none.
    """

    folder: Path
    dtype: str
    device: str
    config: Any
    tokenizer: Any
    max_positions: int | None
    vocab_size: int
    stop_ids: tuple[int, ...]
    forbidden: tuple[int, ...]
    stop_strings: StopStrings | None = None

    def stopping_at(self, strings: Sequence[str]) -> VllmTarget:
        """The same target, whose generations end at these strings too. Raises UserError."""
        if strings and not self.stop_ids:
            raise ConfigError("dataset.stop", list(strings), "[] with engine=vllm and a model without stop ids, by which "
                              "vLLM is told that an answer has ended")
        return self._replace(stop_strings=StopStrings(strings, texts_of(self.tokenizer, self.vocab_size)) if strings else None)

    def ends(self, tokens: np.ndarray) -> bool:
        """Whether generated tokens, int64 (n,), end with a stop id or with the token that completes a stop string."""
        return int(tokens[-1]) in self.stop_ids or (self.stop_strings is not None and self.stop_strings.ends(tokens))

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids of a prompt, int64. Set `add_special_tokens` for text without a chat template."""
        return encode(self.tokenizer, text, add_special_tokens, self.max_positions, self.vocab_size)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of generated tokens, without special tokens, up to a stop string."""
        text = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text if self.stop_strings is None else self.stop_strings.cut(text)


def read(folder: Path, dtype: str, device: str, tokenizer: Any) -> VllmTarget:
    """Reads the target's files, but not its weights. Raises UserError.

    Args:
        dtype: `auto` or a name of PyTorch's types.
    """
    outer = configuration(folder)
    config = outer.get_text_config()
    known = set(tokenizer.get_vocab().values())
    if dtype == "auto":
        dtype = precision.name_of(getattr(config, "dtype", None) or getattr(outer, "dtype", None) or "float32")
    return VllmTarget(folder, dtype, device, config, tokenizer, positions(config), config.vocab_size,
                      _stop_ids(folder, outer, config, tokenizer),
                      tuple(token for token in range(config.vocab_size) if token not in known))


def configuration(folder: Path) -> Any:
    """The configuration of transformers. Raises UserError."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types here; all mean that this file cannot be used
        reason = reason_of(error, 300)
        raise UserError(f"model.path: cannot read config.json in {str(folder)!r}: {reason}") from error


def positions(config: Any) -> int | None:
    """Longest sequence of a configuration, without regard to sliding windows; None without a limit."""
    return getattr(config, "max_position_embeddings", None)


def _stop_ids(folder: Path, *sources: Any) -> tuple[int, ...]:
    import transformers

    if (folder / "generation_config.json").is_file():
        sources = (transformers.GenerationConfig.from_pretrained(folder), *sources)
    return tuple(sorted(stop_ids_of(sources)))
