"""The obviously right engine: one chain, one plain forward of the whole sequence for every token, no cache.

It takes up neither of a draw's offers to save work (`along`, `floor`), and shares nothing with the batched engine but the
model: each token takes a forward of the whole sequence, a blend is made of two head products, and laws are applied by
`exact_law` in float64.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_mcmc.engine import exact_law
from dflash_mcmc.engine.language_model import LanguageModel
from dflash_mcmc.ops import Chain, Law, Operation, Score, drive
from dflash_mcmc.types import ChainResult, Path


class ReferenceEngine:
    """Runs chains one after another.

    Args:
        model: the transformers model itself.
        parts: the same model as the engines see it: its stop ids and forbidden rows are used, nothing else.
        blend: as in the configuration.
    """

    def __init__(self, model: torch.nn.Module, parts: LanguageModel, blend: object):
        self.model, self.parts, self.blend = model, parts, blend

    def run(self, chain: Chain) -> ChainResult:
        """The result of a chain, as its generator returns it."""
        return drive(chain, self.answer)

    def answer(self, operation: Operation) -> Path:
        """The path that a Draw or a Score asks for."""
        path = operation.path
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

    def _append(self, path: Path, token: int, blended: np.ndarray, log_q: np.ndarray) -> Path:
        log_p = exact_law.log_softmax(blended)[token]
        return path.extended(np.array([token]), np.array([log_p]), log_q[token : token + 1],
                             exact_law.interval(log_q, token)[None], token in self.parts.stop_ids)

    def _law(self, path: Path, law: Law, logits: np.ndarray) -> np.ndarray:
        return exact_law.process(logits, law, np.concatenate([path.prompt, path.tokens]))

    def _logits(self, path: Path, source: str) -> tuple[np.ndarray, np.ndarray]:
        """(blended, those of the source) after `path`, float64 (vocabulary,)."""
        tokens = torch.from_numpy(np.concatenate([path.prompt, path.tokens]))[None].to(self.parts.device)
        head, norm, layers = self.model.get_output_embeddings(), self.parts.final_norm, self.parts.layers
        states: list[torch.Tensor] = []
        hooks = [layers[layer].register_forward_hook(lambda module, arguments, output: states.append(output))
                 for layer in self.blend.tapped_layers(len(layers))]
        with torch.inference_mode():
            output = self.model(input_ids=tokens, use_cache=False)
            states = [(state[0] if isinstance(state, tuple) else state)[0, -1] for state in states]
            # A head product for each term: mixing logits, where the batched engine mixes hidden states.
            base = output.logits[0, -1].double()
            logits = self.blend.mix(base, [head(state).double() for state in states], lambda _: head(norm(states[0])).double())
        for hook in hooks:
            hook.remove()
        values = (logits if source == "blended" else base, logits)
        source_logits, blended = (v.masked_fill(self.parts.forbidden, -torch.inf).cpu().numpy() for v in values)
        return blended, source_logits
