"""A loaded target: the parts of a `transformers` causal language model that the engines use.

Mixtures of experts have numbers that do not depend on the batch. `transformers` gives each expert the tokens of the batch that
chose it. On a CPU the bits of a product depend on its number of rows, so the numbers of a chain would depend on the other
chains. Here each expert has a multiple of 8 rows, which ensures the same bits (notebook, "Bits"), and a token's experts are
summed in the order of their weights.
"""

import copy
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dflash_mcmc.engine.batching import attention, cache as caches, linear, recurrent_state
from dflash_mcmc.engine.batching.stop_strings import StopStrings
from dflash_mcmc.errors import UserError, note, reason_of
from dflash_mcmc.grading.extraction import cut
from dflash_mcmc.model.files import stop_ids_of
from dflash_mcmc.process import machine
from dflash_mcmc.process.turns import Turn
from dflash_mcmc.tokenizer import GROWING_ROPES, TokenTexts, continuation, encode, max_positions, ropes_of, texts_of

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.gpu import GpuLoop

_REASONS = {
    caches.LINEAR: "a recurrent state, which cannot be rolled back",
    "conv": "a state, which cannot be rolled back",
    "hybrid": "attention beside a recurrent state, which cannot be rolled back",
    "hybrid_sliding": "attention beside a recurrent state, which cannot be rolled back",
    "indexed_attention": "the tokens that a query attends to are chosen by an index with a cache of its own",
    "compressed_sparse_attention": "keys of several tokens are merged",
    "heavily_compressed_attention": "keys of several tokens are merged",
}


def refused(model: Any, what: str, allowed: str) -> UserError:
    """The error for a model, in one line."""
    name = type(model).__name__
    return UserError(f"model.path: {name} {what}; allowed with engine=slots: {allowed}, or engine=vllm, if vLLM has {name}, "
                     "or engine=api with a server that has it")


def _refused_layers(model: Any, config: Any) -> str | None:
    """The kind of the layers that are not computed here, with the reason; None if there are none."""
    computed = caches.recurrent_shape(config, torch.float32) is not None
    types = sorted(attention.unmasked_types(config) - ({caches.LINEAR} if computed else set()))
    if types:
        return f"{' and '.join(types)} layers ({_REASONS.get(types[0], 'a cache of another form')})"
    if getattr(model, "_is_stateful", False) and not computed:
        return "recurrent layers (a recurrent state, which cannot be rolled back)"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "local attention layers (a window that the model applies by the place in memory)"
    if getattr(config, "use_bidirectional_attention", None):
        return "bidirectional attention layers (they look at later tokens)"
    if getattr(config, "altup_num_inputs", None):
        return "AltUp layers (a token has several hidden states)"
    if getattr(config, "num_kv_shared_layers", None):
        return "layers that share the keys and values of another layer (they have no cache of their own)"
    return None


NAME = "batch_invariant"
_ROW_STEP = 8
_DENSE = frozenset(("Llama4TextExperts",))
"""Classes that compute every expert for every token."""


def batch_invariant_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, (tokens, width).

    Args:
        module: experts of a class that `use_experts_implementation` of `transformers` decorates.
        hidden: (tokens, width).
        chosen: int64 (tokens, k), the experts of each token.
        weights: (tokens, k).
    """
    numbers = chosen.reshape(-1)
    outputs = torch.empty(len(numbers), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert in numbers.unique().tolist():
        pairs = (numbers == expert).nonzero()[:, 0]
        rows = hidden[pairs // chosen.shape[1]]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, caches.round_up(len(rows), _ROW_STEP) - len(rows)))
        inner = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", expert, padded)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        output = _linear(module, "down_proj", expert, inner)
        outputs[pairs] = (module.post_expert_norm(output) if module.has_post_expert_norm else output)[: len(rows)]
    return (outputs * weights.reshape(-1, 1)).view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


def _linear(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch.nn.functional.linear(rows, weight.t() if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(NAME, batch_invariant_experts)


_LAYER_NAMES = ("layers", "h")
_NORM_NAMES = ("norm", "final_layernorm", "ln_f")
_MOST_KNOWN = 128
"""Sets of stop strings whose tables are kept."""


class LanguageModel:
    """A causal language model with its tokenizer.

    Attributes:
        decoder: maps token ids to the hidden state after the final norm.
        head: linear, hidden state to logits.
        layers: the decoder layers; `tapped` reads their outputs.
        vocab_size: rows of the head.
        stop_ids: all ids that end a generation, from generation_config, config and tokenizer.
        stop_strings: strings that end a generation; None for none.
        cache_shape: shape of the keys and values of a token, and of the states of recurrent layers.
        recurrent_nets: the recurrent parts of the layers that have one, in the order of the layers.
        has_experts: whether it has a mixture of experts whose implementation can be chosen.
        uncaptured: why a forward is not captured as a CUDA graph; None if it is. A growing rotary embedding cannot be
            captured, because it reads the positions on the host, and neither can a mixture of experts. Recurrent layers have
            not been captured yet.
        turn: taken by the engine that runs the model.
        max_positions: longest sequence, prompt included.
        masks: which earlier tokens the layers attend to.
        changes_scores: whether its attention has sinks or a soft-cap.
        softcap: the logits x of the head become softcap · tanh(x / softcap); None if they stay.

    Args:
        head_copy: whether a float32 copy of the head's weights is kept; see `Float32Head`.
        packs: whether the decoder's linear layers may be replaced (`linear.py`), and norms be fused, in the model itself.
            It then has no gradients.
    """

    def __init__(self, model: Any, tokenizer: Any = None, stop_ids: Iterable[int] = (),
                 head_copy: bool | None = None, packs: bool = False):
        self.config = model.config
        if layers := _refused_layers(model, self.config.get_text_config()):
            raise refused(model, f"has {layers}", "attention over all earlier tokens, over a window or in chunks, or the "
                          "linear attention of Qwen3-Next and Qwen3.5, in every layer")
        self.decoder = model.model if model.base_model is model else model.base_model
        self.head = model.get_output_embeddings()
        self._cache_argument = caches.cache_argument(self.decoder)
        self._loop: linear.LayerLoop | GpuLoop | None = None
        self.tokenizer = tokenizer
        self.device, self.dtype = self.head.weight.device, self.head.weight.dtype
        if self.device.type == "cpu":
            machine.keep_memory()
        self.layers = _find(self.decoder, _LAYER_NAMES)
        self.final_norm = _find(self.decoder, _NORM_NAMES)
        self.vocab_size = self.head.weight.shape[0]
        self.max_positions = max_positions(self.config)
        self.masks = attention.masks_of(self.config, self.decoder)
        self.changes_scores = attention.changes_scores(self.config)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.has_experts = any(hasattr(module, "has_post_expert_norm") for module in self.decoder.modules())
        recurrent = caches.recurrent_shape(self.config, self.dtype)
        self.recurrent_nets = [self.layers[layer].linear_attn for layer in recurrent.layers] if recurrent else []
        recurrent_state.install(self.recurrent_nets)
        self.uncaptured: str | None = None
        if any(rope.get("rope_type") in GROWING_ROPES for rope in ropes_of(self.config)):
            self.uncaptured = "the model's rotary embedding grows with the text"
        elif self.has_experts:
            self.uncaptured = "the model is a mixture of experts"
        elif self.recurrent_nets:
            self.uncaptured = "the model has recurrent layers"
        self._float32_head = linear.Float32Head(self.head, head_copy)
        stated = stop_ids_of((getattr(model, "generation_config", None), model.config, tokenizer))
        self.stop_ids = tuple(sorted({*stop_ids, *stated}))
        self.stop_strings: StopStrings | None = None
        self._known_strings: dict[tuple[str, ...], StopStrings] = {}  # shared by the copies of this model
        if tokenizer is not None:
            token_ids = set(tokenizer.get_vocab().values())
            self.forbid([token for token in range(self.vocab_size) if token not in token_ids])
        self._refuse_unsupported(model)
        self.cache_shape = self._measured_cache(model, recurrent)
        self.turn = Turn()
        if packs and not self.has_experts and not self.recurrent_nets:
            self._pack()

    def without_stops(self) -> "LanguageModel":
        """The same model, whose generations end at their horizon alone."""
        endless = copy.copy(self)
        endless.stop_ids, endless.stop_strings = (), None
        return endless

    def stopping_at(self, strings: Sequence[str]) -> "LanguageModel":
        """The same model, whose generations end at these strings too. Raises UserError for an unknown kind of tokenizer."""
        if not strings and self.stop_strings is None:
            return self
        stopped = copy.copy(self)
        stopped.stop_strings = self.strings(tuple(strings)) if strings else None
        return stopped

    def strings(self, stop: tuple[str, ...]) -> StopStrings:
        """The tables of stop strings, at least one. Raises UserError for an unknown kind of tokenizer."""
        cached = self._known_strings
        if stop not in cached:
            if len(cached) >= _MOST_KNOWN:
                del cached[next(iter(cached))]
            cached[stop] = StopStrings(stop, self._token_texts)
        return cached[stop]

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return texts_of(self.tokenizer, self.vocab_size)

    def hidden(self, tokens: torch.Tensor, cache: Cache | None = None, **options: Any) -> torch.Tensor:
        """Hidden states (rows, n, hidden) of tokens, int64 (rows, n), after the final norm.

        Args:
            cache: takes the keys and values of the tokens, and gives those of earlier ones.
            options: what else the decoder takes, `position_ids` and `attention_mask`.
        """
        loop = self.loop_under(self.config._attn_implementation)
        if loop is not None and isinstance(cache, caches.KVCache):
            return loop.hidden(tokens, cache, options["attention_mask"], options["position_ids"])
        options = {self._cache_argument: cache, "use_cache": cache is not None, **options}
        return self.decoder(input_ids=tokens, **options).last_hidden_state

    def loop_under(self, implementation: str) -> "linear.LayerLoop | GpuLoop | None":
        """This package's loop of the layers under an implementation of attention; None where modules of transformers run."""
        loop = self._loop
        own = loop is not None and not loop.is_hooked and (not loop.has_ranges or implementation == attention.OWN)
        return loop if own else None

    @property
    def takes_ranges(self) -> bool:
        """Whether `hidden` takes the first key that each token sees, int64 (rows, n) or None for 0, in place of a mask."""
        loop = self.loop_under(self.config._attn_implementation)
        return loop is not None and loop.has_ranges

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (..., vocab_size) of hidden states after the final norm; -inf for ids without a token."""
        return linear.soft_capped(self.head_logits(hidden), self.softcap, self.forbidden)

    def logits_of(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Like `logits`, (..., n), of the ids, int64 (n,), alone, which must have a token."""
        bias = getattr(self.head, "bias", None)
        logits = torch.nn.functional.linear(hidden.float(), self.head.weight[ids].float(), None if bias is None else
                                            bias[ids].float())
        return linear.soft_capped(logits, self.softcap, torch.zeros_like(ids, dtype=torch.bool))

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Like `logits`, without the model's soft-cap. A draft that uses the head has a soft-cap of its own, or none."""
        return self._float32_head.logits(hidden)

    @property
    def forbidden(self) -> torch.Tensor:
        """Bool (vocab_size,), True for ids without a token (padding rows of the head), which can never be drawn."""
        return self._float32_head.forbidden

    @property
    def head_keeps_bits(self) -> bool:
        """Whether the bits of a row of logits do not depend on the number of rows, by `linear.py`."""
        return self._float32_head.prepared is not None

    def forbid(self, tokens: Sequence[int]) -> None:
        """Sets the logits of tokens to -inf."""
        self._float32_head.forbid(tokens)

    @contextmanager
    def tapped(self, layers: tuple[int, ...]) -> Iterator[list[torch.Tensor]]:
        """Yields a list. Each forward inside the context fills it with the outputs of these decoder layers, in this order.

        Layer -1 is the embedding.
        """
        outputs: list[torch.Tensor] = [torch.empty(0)] * len(layers)

        def keep(slot: int):
            def hook(module, arguments, output):
                outputs[slot] = output[0] if isinstance(output, tuple) else output
            return hook

        modules = [self.decoder.get_input_embeddings() if layer == -1 else self.layers[layer] for layer in layers]
        handles = [module.register_forward_hook(keep(slot)) for slot, module in enumerate(modules)]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def attending(self, implementation: str) -> Iterator[None]:
        """A context in which this implementation of `transformers`' registry computes attention.

        On a CPU, experts are computed so that their numbers do not depend on the batch.
        """
        before, experts_before = self.config._attn_implementation, self.config._experts_implementation
        own_experts = self.has_experts and self.device.type == "cpu"
        self.decoder.set_attn_implementation(implementation)
        if own_experts:
            self.decoder.set_experts_implementation(NAME)
        try:
            yield
        finally:
            self.decoder.set_attn_implementation(before)
            if own_experts:
                self.decoder.set_experts_implementation(experts_before)

    @property
    def reading_attention(self) -> str:
        """The implementation of attention for a forward over a whole sequence."""
        return "grouped" if self.changes_scores else "sdpa"

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids of a prompt, int64. Set `add_special_tokens` for text without a chat template."""
        return encode(self.tokenizer, text, add_special_tokens, self.max_positions, self.vocab_size)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of generated tokens, without special tokens, up to a stop string.

        Think tags are kept, because graders search after them.
        """
        text = continuation(self.tokenizer, tokens.tolist())
        return text if self.stop_strings is None else cut(text, self.stop_strings.strings)

    def _pack(self) -> None:
        """Replaces the linear layers. A loop runs them where it has the bits of the modules, or on a GPU their numbers."""
        if self.device.type == "cpu":
            linear.replace_layers(self.decoder)
            self._loop = linear.loop_of(self.decoder, self.cache_shape)
        elif linear.is_looped(self.config) and importlib.util.find_spec("triton"):
            from dflash_mcmc.engine.batching.gpu import loop_of

            try:
                self._loop = loop_of(self.decoder, self.cache_shape, self.device)
            except Exception as error:  # Triton compiles for this GPU now, which fails in many ways
                note(f"layers: modules of transformers and not this package's loop, because {reason_of(error, 300)}")

    def _measured_cache(self, model: torch.nn.Module, recurrent: caches.RecurrentShape | None) -> caches.CacheShape:
        """The shape of what a token leaves in the cache of `transformers`."""
        cache = DynamicCache(config=self.config)
        with torch.inference_mode():
            self.hidden(torch.zeros(1, 1, dtype=torch.int64, device=self.device), cache)
        others = set(recurrent.layers) if recurrent else set()
        layers: list[Any] = [layer for index, layer in enumerate(cache.layers) if index not in others]
        shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype) for layer in layers}
        if len(shapes) > 1:
            raise refused(model, "has layers whose keys differ in shape",
                          "the same number of key heads and the same dimensions in every layer")
        return caches.CacheShape(len(layers), *shapes.pop(), recurrent)

    def _refuse_unsupported(self, model: torch.nn.Module) -> None:
        probe = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        with torch.inference_mode():
            raw = self.head(self.hidden(probe))
            ours = linear.soft_capped(raw, self.softcap, torch.zeros_like(self.forbidden))
            theirs = model(input_ids=probe, use_cache=False).logits
        if theirs.isnan().any():
            raise UserError(f"model.path: {type(model).__name__} has logits that are not numbers; allowed: a checkpoint whose "
                            "weights are numbers, none of them NaN")
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
            raise refused(model, "does more to its logits than a linear head and a soft-cap (a scale)",
                          "a linear head, with or without a soft-cap")
        with self.attending("grouped"):
            if not (self.masks.plain or attention.agrees(self.decoder, self.config, self.device)):
                raise refused(model, f"has other windows than its layer_types say ({self.masks.reaches})",
                              "windows and chunks by layer_types")
        names = {type(module).__name__ for module in self.decoder.modules() if not hasattr(module, "has_post_expert_norm")}
        if self.device.type == "cpu" and any(name.endswith("Experts") for name in names - _DENSE):
            note(f"model.path: the experts of {type(model).__name__} are computed for all tokens of a batch together, so that "
                 "the last bits of a record depend on the other samples in its batch")


def _find(decoder: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if hasattr(decoder, name):
            return getattr(decoder, name)
    raise UserError(f"model.path: {type(decoder).__name__} has none of {', '.join(names)}; allowed: a decoder-only model "
                    "laid out as Qwen, Llama or GPT-2")
