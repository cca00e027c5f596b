"""The obviously right engine: one chain, one plain forward of the whole sequence for every token, no cache.

It takes up neither of a draw's offers to save work (`along`, `floor`), and shares nothing with the batched engine but the
model: each token takes a forward of the whole sequence, a blend is made of two head products, and laws are applied by
`exact_law` in float64.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.speculative.dflash.network import block_pass
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.ops import Chain, Operation, SamplingParams, Score, drive, grid_origin, grid_slot
from dflash_mcmc.types import ChainResult, Trajectory


class ReferenceEngine:
    """Runs chains one after another.

    Args:
        model: the transformers model itself.
        parts: the same model as the engines see it: its stop ids and forbidden rows are used, nothing else.
        blend: as in the configuration.
        drafter: that the blend mixes in, or that laws are drawn from; its network is used, nothing else.
    """

    def __init__(self, model: torch.nn.Module, parts: LanguageModel, blend: object, drafter: DFlashDrafter | None = None):
        self.model, self.parts, self.blend, self.drafter = model, parts, blend, drafter
        self._origin = 0

    def run(self, chain: Chain) -> ChainResult:
        """The result of a chain, as its generator returns it."""
        return drive(chain, self.answer)

    def answer(self, operation: Operation) -> Trajectory:
        """The path that a Draw or a Score asks for."""
        path = operation.path
        self._origin = grid_origin(self.blend, path)
        if isinstance(operation, Score):
            for token in operation.tokens:
                blended, source = self._logits(path, operation.source)
                path = self._append(path, int(token), blended, self._law(path, operation.law, source))
            return path
        while not path.complete(operation.horizon):
            blended, source = self._logits(path, operation.source)
            log_q = self._law(path, operation.law, source)
            uniform = operation.key.uniforms(path.length, path.length + 1)[0]
            path = self._append(path, exact_law.draw(log_q, float(uniform)), blended, log_q)
        return path

    def _append(self, path: Trajectory, token: int, blended: np.ndarray, log_q: np.ndarray) -> Trajectory:
        log_p = exact_law.log_softmax(blended)[token]
        return path.extended(np.array([token]), np.array([log_p]), log_q[token : token + 1],
                             exact_law.interval(log_q, token)[None], token in self.parts.stop_ids)

    def _law(self, path: Trajectory, law: SamplingParams, logits: np.ndarray) -> np.ndarray:
        return exact_law.process(logits, law, np.concatenate([path.prompt, path.tokens]))

    @torch.inference_mode()
    def _logits(self, path: Trajectory, source: str) -> tuple[np.ndarray, np.ndarray]:
        """(blended, those of the source) after `path`, float64 (vocabulary,)."""
        tokens = torch.from_numpy(np.concatenate([path.prompt, path.tokens]))[None].to(self.parts.device)
        head, norm, layers = self.model.get_output_embeddings(), self.parts.final_norm, self.parts.layers
        output = self.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        # Entry l + 1 is the output of layer l; that of the last layer comes behind the norm, so that it is caught by a hook.
        states = [self._output(tokens, layer)[0, -1] for layer in self.blend.tapped_layers(len(layers))]
        # A head product for each term: mixing logits, where the batched engine mixes hidden states.
        base = output.logits[0, -1].double()
        drafted = self._drafted(path, tokens, output.hidden_states, base) if self.drafter else None
        parts = [drafted] if getattr(self.blend, "needs_draft", False) else [head(state).double() for state in states]
        blended = self.blend.mix(base, parts, lambda _: head(norm(states[0])).double())
        if source == "draft" and not self._slot(path):
            drafted = blended
        values = ({"blended": blended, "base": base, "draft": drafted}[source], blended)
        source_logits, blended = (v.masked_fill(self.parts.forbidden, -torch.inf).cpu().numpy() for v in values)
        return blended, source_logits

    def _output(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Of a decoder layer, (1, tokens, width)."""
        states: list[torch.Tensor] = []
        hook = self.parts.layers[layer].register_forward_hook(lambda module, arguments, output: states.append(output))
        self.model(input_ids=tokens, use_cache=False)
        hook.remove()
        return states[0][0] if isinstance(states[0], tuple) else states[0]

    def _slot(self, path: Trajectory) -> int:
        """Of the token behind `path`."""
        return grid_slot(len(path.prompt) + path.length - self._origin, self.drafter.num_drafted + 1)

    def _drafted(self, path: Trajectory, tokens: torch.Tensor, states: tuple[torch.Tensor, ...], base: torch.Tensor) -> torch.Tensor:
        """Logits of the draft for the token behind `path`; those of the model where the grid has no draft."""
        network, block = self.drafter.network, self.drafter.num_drafted + 1
        slot = self._slot(path)
        if not slot:
            return base
        anchor = tokens.shape[1] - slot
        features = torch.cat([states[layer + 1][:, :anchor] for layer in network.shape.target_layers], dim=-1)
        keys, values = network.keys_values(network.context(features), torch.arange(anchor, device=tokens.device)[None])
        fed = torch.full((1, 1, block), network.shape.mask_token_id, device=tokens.device)
        fed[..., 0] = tokens[0, anchor]
        embeddings = self.parts.decoder.get_input_embeddings().weight[fed] * network.shape.embedding_scale
        hidden = block_pass(network, keys, values, torch.arange(anchor, device=tokens.device)[None],
                            torch.tensor([[anchor]], device=tokens.device), embeddings)
        logits = self.model.get_output_embeddings()(hidden[0, 0, slot]).double() * network.shape.logit_scale
        softcap = network.shape.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
