"""A loaded target: the parts of a `transformers` causal language model that the engines use."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dflash_mcmc.errors import UserError
from dflash_mcmc.inference import delta_net
from dflash_mcmc.inference.cache import CacheShape
from dflash_mcmc.inference.prompt_encoder import GROWING_ROPES, encode, max_positions, rope_of
from dflash_mcmc.inference.recurrent_shape import LINEAR, RecurrentShape, recurrent_shape

_LAYER_NAMES = ("layers", "h")
_NORM_NAMES = ("norm", "final_layernorm", "ln_f")
_FULL_ATTENTION = {"full_attention", "attention", "sliding_attention"}


class LanguageModel:
    """A causal language model with its tokenizer.

    Attributes:
        decoder: maps token ids to the hidden state after the final norm.
        head: linear, hidden state to logits.
        layers: the decoder layers; `tapped` reads their outputs.
        vocab_size: rows of the head.
        forbidden: bool (vocab_size,), True for ids without a token (padding rows of the head), which can never be drawn.
        stop_ids: all ids that end a generation, from generation_config, config and tokenizer.
        cache_shape: shape of the keys and values of a token, and of the states of recurrent layers.
        recurrent_nets: the recurrent parts of the layers that have one, in the order of the layers.
        capturable: whether a forward can be captured as a CUDA graph. A model with a growing rotary embedding cannot be
            captured, because this embedding reads the positions on the host. A model with recurrent layers has not been
            captured yet.
        max_positions: longest sequence, prompt included, on which the model has plain full attention. A sliding window
            limits it to the window.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Any = None, stop_ids: Iterable[int] = ()):
        self.decoder, self.head, self.config = _parts(model)
        self.tokenizer = tokenizer
        self.device, self.dtype = self.head.weight.device, self.head.weight.dtype
        self.layers = _find(self.decoder, _LAYER_NAMES)
        self.final_norm = _find(self.decoder, _NORM_NAMES)
        self.vocab_size = self.head.weight.shape[0]
        self.max_positions = max_positions(self.config)
        recurrent = recurrent_shape(self.config, self.dtype)
        self.recurrent_nets = [self.layers[number].linear_attn for number in recurrent.layers] if recurrent else []
        delta_net.install(self.recurrent_nets)
        self.capturable = rope_of(self.config).get("rope_type") not in GROWING_ROPES and recurrent is None
        # The head works in float32. Logits in bfloat16 would have errors of up to 0.1 nat per token, multiplied by alpha.
        self._head_weight = self.head.weight.detach().float()
        self.stop_ids = tuple(sorted({*stop_ids, *_stop_ids(model, tokenizer)}))
        self.forbidden = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        self._head_bias = None if self.head.bias is None else self.head.bias.detach().float()
        if tokenizer is not None:
            known = set(tokenizer.get_vocab().values())
            self.forbid([token for token in range(self.vocab_size) if token not in known])
        self._refuse_unsupported(model, recurrent)
        self.cache_shape = _cache_shape(model, self.device, recurrent)

    def without_stops(self) -> LanguageModel:
        """The same model, whose generations end at their horizon alone."""
        endless = copy.copy(self)
        endless.stop_ids = ()
        return endless

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (..., vocab_size) of hidden states after the final norm; -inf for ids without a token."""
        return torch.nn.functional.linear(hidden.float(), self._head_weight, self._head_bias)

    def forbid(self, tokens: Sequence[int]) -> None:
        """Sets the logits of tokens to -inf through the head's bias, which needs no extra pass over the vocabulary."""
        if not len(tokens):
            return
        self.forbidden[torch.tensor(tokens, device=self.device)] = True
        bias = torch.zeros(self.vocab_size, device=self.device) if self._head_bias is None else self._head_bias
        self._head_bias = bias.masked_fill(self.forbidden, -torch.inf)

    @contextmanager
    def tapped(self, layers: tuple[int, ...]) -> Iterator[list[torch.Tensor]]:
        """Yields a list. Each forward inside the context fills it with the outputs of these decoder layers, in this order."""
        outputs: list[torch.Tensor] = [torch.empty(0)] * len(layers)

        def keep(slot: int):
            def hook(module, arguments, output):
                outputs[slot] = output[0] if isinstance(output, tuple) else output
            return hook

        handles = [self.layers[layer].register_forward_hook(keep(slot)) for slot, layer in enumerate(layers)]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def attending(self, implementation: str) -> Iterator[None]:
        """A context in which this implementation of `transformers`' registry computes attention."""
        before = self.config._attn_implementation
        self.decoder.set_attn_implementation(implementation)
        try:
            yield
        finally:
            self.decoder.set_attn_implementation(before)

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids of a prompt, int64. Set `add_special_tokens` for text without a chat template."""
        return encode(self.tokenizer, text, add_special_tokens)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of generated tokens, without special tokens. Think tags are kept, because graders search after them."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _refuse_unsupported(self, model: torch.nn.Module, recurrent: RecurrentShape | None) -> None:
        known = _FULL_ATTENTION | ({LINEAR} if recurrent else set())
        kinds = set(getattr(self.config, "layer_types", None) or known) - known
        if kinds or (getattr(model, "_is_stateful", False) and not recurrent):
            kind = ", ".join(sorted(kinds)) or "recurrent"
            raise UserError(f"model.path: {type(model).__name__} has layers of kind {kind}; allowed: full attention, and the "
                            "linear attention of Qwen3-Next and Qwen3.5 (a cache that can be rolled back)")
        probe = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        with torch.inference_mode():
            ours = self.head(self.decoder(input_ids=probe, use_cache=False).last_hidden_state)
            theirs = model(input_ids=probe, use_cache=False).logits
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
            raise UserError(f"model.path: {type(model).__name__} does more to its logits than a linear head (a soft-cap or a "
                            "scale); allowed: a plain linear head")


def _parts(model: Any) -> tuple[Any, Any, Any]:
    """Decoder, head and config of a model of `transformers`."""
    return model.base_model, model.get_output_embeddings(), model.config


def _cache_shape(model: Any, device: torch.device, recurrent: RecurrentShape | None) -> CacheShape:
    with torch.inference_mode():
        cache = model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=True).past_key_values
    others = set(recurrent.layers) if recurrent else set()
    layers = [layer for number, layer in enumerate(cache.layers) if number not in others]
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype) for layer in layers}
    if len(shapes) > 1:
        raise UserError(f"model.path: {type(model).__name__} has layers whose keys differ in shape; allowed: the same number "
                        "of key heads and the same dimensions in every layer")
    return CacheShape(len(layers), *shapes.pop(), recurrent)


def _find(decoder: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if hasattr(decoder, name):
            return getattr(decoder, name)
    raise UserError(f"model.path: {type(decoder).__name__} has none of {', '.join(names)}; allowed: a decoder-only model "
                    "laid out as Qwen, Llama or GPT-2")


def _stop_ids(model: Any, tokenizer: object | None) -> set[int]:
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found
