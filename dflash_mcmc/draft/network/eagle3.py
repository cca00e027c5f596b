"""The EAGLE-3 draft network: one decoder layer that drafts token by token from the target's features and its own states.

The features of a token are three of the target's layers, fused by a linear map. The layer's attention reads the embedding of
the token x_j beside a state: the fused features of x_(j-1), or, for drafted tokens, its own output at x_(j-1). Its output
gives the logits of x_(j+1), over a vocabulary of its own. A step has the position of its token. The published code counts from
the token before; a rotation of all positions by one changes nothing.

The checkpoints have three published layouts. SafeAILab and SpecForge call the layer `midlayer`, and speculators `layers.0`.
Layers of the target are those of `hidden_states` in the layout of speculators, which counts the embedding, and decoder layers
in that of SpecForge. SafeAILab names none: it takes the outputs of layers 1, L / 2 - 1 and L - 4 of L. The others do so too if
they have no list.

Source: EAGLE-3 (arXiv 2503.01840).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dflash_mcmc.draft.network.checkpoint import DEFAULT_THETA, FIELD, DraftConfig, Family
from dflash_mcmc.draft.network.dflash import Attention, DraftHead, NetworkShape, Qwen3RMSNorm, Rotation, feed_forward
from dflash_mcmc.errors import UserError

NUM_FEATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape(NetworkShape):
    """The shape of an EAGLE-3 draft. Without `target_layers` they are those of the published code."""

    vocab_size: int
    head_norms: bool = False
    """Whether queries and keys are normed, as in Qwen3."""
    norm_before_residual: bool = False
    """Whether the residual is the normed state."""
    norm_before_fc: bool = False
    """Whether the features are normed together before they are fused."""
    fc_norm: bool = False
    """Whether each layer's features are normed before they are fused."""
    norm_output: bool = False
    """Whether the state that the next step reads is the normed output."""

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        if not self.target_layers and num_layers < 7:
            raise UserError(f"{FIELD}: the draft reads layers 1, L / 2 - 1 and L - 4 of the target, which has {num_layers} "
                            "layers; allowed: 7 or more, or a config.json with eagle_aux_hidden_state_layer_ids")
        return self.target_layers or (1, num_layers // 2 - 1, num_layers - 4)


class Eagle3Config(DraftConfig):
    """The config.json of an EAGLE-3 draft."""

    network = "EAGLE-3"
    shape_type = Eagle3Shape
    section = "eagle_config"
    architectures = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
    speculators = "eagle3"
    speculators_layers = "eagle_aux_hidden_state_layer_ids"
    layer_models = ("llama", "qwen3")
    least_layer = -1
    allowed = "LlamaForCausalLMEagle3, or speculators_model_type eagle3"
    foreign: ClassVar[dict[str, tuple]] = {
        "speculators_model_type": (None,), "quantization_config": (None,), "hidden_act": (None, "silu"),
        "mlp_bias": (None, False), "pretraining_tp": (None, 1), "use_aux_hidden_state": (None, True),
        "num_hidden_layers": (None, 1), "parallel_drafting": (None, False),
    }
    own_foreign: ClassVar[dict[str, tuple]] = {
        "norm_output": (None,), "fc_norm": (None, False), "norm_before_fc": (None, False),
        "norm_before_residual": (None, False), "model_type": (None, "llama"),
    }
    """Fields that layouts other than speculators' may not have: they mean other things there, or nothing."""

    def fields(self) -> dict[str, Any]:
        if self.is_speculators:
            names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            if type(self.top.get(names[0])) is not bool:
                self.refuse(f"has no {names[0]}, whose default differs between engines", "true or false")
            flags = {name: bool(self.top.get(name)) for name in names}
        else:
            self.refuse_others(self.own_foreign)
            if self.top.get(self.speculators_layers) is not None:
                self.refuse(f"has {self.speculators_layers} {self.top[self.speculators_layers]} outside eagle_config, where "
                            "engines count layers differently", "a list in eagle_config, whose first layer is 0")
            self.top.setdefault("rope_theta", DEFAULT_THETA)
            flags = {}
        common = self.common()
        size = self.integer("vocab_size")
        own = self.integer("draft_vocab_size", most=size)
        return {**common, **flags, "sliding": (None,), "head_norms": self.top.get("model_type") == "qwen3", "vocab_size": size,
                "draft_vocab_size": None if own == size else own}

    def _target_layers(self, num_layers: int) -> tuple[int, ...]:
        layers = self.top.get("target_layer_ids") if self.is_speculators else self.own.get(self.speculators_layers)
        if layers is None:
            return ()
        found = self.layer_list(layers)
        if len(found) != NUM_FEATURES:
            self.refuse(f"reads {len(found)} layers of the target", f"{NUM_FEATURES}")
        return found


class EagleLayer(torch.nn.Module):
    """The decoder layer. Its attention reads the normed embedding beside the normed state."""

    def __init__(self, shape: Eagle3Shape):
        super().__init__()
        self.from_normed = shape.norm_before_residual
        self.self_attn = Attention(shape, 2 * shape.hidden_size, shape.head_norms)
        self.mlp = feed_forward(shape)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Qwen3RMSNorm(shape.hidden_size, shape.norm_eps) for _ in range(3))

    def inputs(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What attention reads, (rows, m, 2 · hidden)."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)

    def forward(self, embedded: torch.Tensor, state: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor],
                attend: Callable) -> torch.Tensor:
        residual = self.hidden_norm(state) if self.from_normed else state
        hidden = residual + self.self_attn(self.inputs(embedded, state), rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(torch.nn.Module):
    """The network. Its state dict is the published one, without a copy of the target's embedding."""

    d2t: torch.Tensor
    """With a reduced vocabulary: int64 (tokens,), the target's id of each token minus its place."""

    def __init__(self, shape: Eagle3Shape):
        super().__init__()
        self.shape = shape
        self.rotation = Rotation(shape)
        self.layers = torch.nn.ModuleList([EagleLayer(shape)])
        self.fc = torch.nn.Linear(NUM_FEATURES * shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = Qwen3RMSNorm(shape.hidden_size, shape.norm_eps)
        if shape.norm_before_fc:
            self.input_norm = Qwen3RMSNorm(NUM_FEATURES * shape.hidden_size, shape.norm_eps)
        if shape.fc_norm:
            self.fc_norm = torch.nn.ModuleList(Qwen3RMSNorm(shape.hidden_size, shape.norm_eps) for _ in range(NUM_FEATURES))
        self.lm_head = DraftHead(shape.draft_vocab_size or shape.vocab_size, shape.hidden_size)
        if shape.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

    def fused(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """States (rows, m, hidden) from the outputs of the target's layers, each (rows, m, hidden)."""
        if self.shape.fc_norm:
            features = [norm(each) for norm, each in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        return self.fc(self.input_norm(joined) if self.shape.norm_before_fc else joined)

    def keys_values(self, embedded: torch.Tensor, states: torch.Tensor,
                    positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each (rows, key heads, m, head_dim), of tokens beside the states of the tokens before them."""
        layer: Any = self.layers[0]
        return layer.self_attn.keys_values(layer.inputs(embedded, states), self.rotation(positions, states.dtype))

    def forward(self, embedded: torch.Tensor, state: torch.Tensor, positions: torch.Tensor,
                attend: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the head reads, the state for the next step), each (rows, m, hidden).

        Args:
            embedded: (rows, m, hidden), embeddings of the tokens at `positions`, int64 (rows, m).
            state: (rows, m, hidden), fused features of the tokens before them, or the states of the steps before.
            attend: see `DFlash.forward`, without the layer.
        """
        hidden = self.layers[0](embedded, state, self.rotation(positions, embedded.dtype), attend)
        normed = self.norm(hidden)
        return normed, normed if self.shape.norm_output else hidden


FAMILY = Family(Eagle3Config, Eagle3, ("midlayer.", "layers.0."))
