"""The reference engine. It runs one chain at a time without a cache, with a forward of the whole sequence for every token.

It ignores the fields of a draw that save work (`along`, `floor`). It shares only the model with the batched engine. A blend
is computed from two head products, and `exact_law` applies sampling parameters in float64.
"""

from typing import Any

import numpy as np
import torch

from dflash_mcmc.draft.network.dflash import block_pass
from dflash_mcmc.engine.batching.interface import TargetBlend
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.oracle import exact_law
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
from dflash_mcmc.ops import Operation, Result, SamplingParams, Score, Steps, drive, grid_slot
from dflash_mcmc.types import Trajectory


class ReferenceEngine:
    """Runs chains one after another.

    Args:
        model: the transformers model itself.
        parts: the same model as a LanguageModel, which gives its parts, stop ids and forbidden rows.
        blend: changes the last hidden state; None for no change.
        drafter: a draft for the blend, or a draft from which tokens are drawn; only its network is used.
        companion: the other transformers model of a blend that mixes logits.
        second: its prompts by the bytes of the target's; None if it reads the same.
    """

    def __init__(self, model: Any, parts: LanguageModel, blend: TargetBlend | None,
                 drafter: DFlashDrafter | None = None, companion: Any = None, second: Any = None):
        self.model, self.parts, self.drafter, self.companion, self.second = model, parts, drafter, companion, second
        self.blend = TargetBlend() if blend is None else blend

    def run(self, chain: Steps[Result]) -> Result:
        """The result of a chain."""
        return drive(chain, self.answer)

    def answer(self, operation: Operation) -> Trajectory:
        """The answer to a Draw or a Score."""
        trajectory = operation.trajectory
        if isinstance(operation, Score):
            for token in operation.tokens:
                trajectory = self._append(trajectory, int(token), operation, *self._logits(trajectory, operation.source))
            return trajectory
        while not trajectory.complete(operation.horizon):
            blended, source = self._logits(trajectory, operation.source)
            log_q = self._law(trajectory, operation.params, source)
            uniform = operation.key.uniforms(trajectory.length, trajectory.length + 1)[0]
            trajectory = self._append(trajectory, exact_law.draw(log_q, float(uniform)), operation, blended, source)
        return trajectory

    def _append(self, trajectory: Trajectory, token: int, operation: Operation, blended: np.ndarray,
                source: np.ndarray) -> Trajectory:
        log_p, log_q = exact_law.log_softmax(blended), self._law(trajectory, operation.params, source)
        under = [self._law(trajectory, params, source) for params in operation.laws]
        return trajectory.extended(
            np.array([token]), log_p[token : token + 1], log_q[token : token + 1], exact_law.intervals(log_q)[token][None],
            self._ends(trajectory, token, operation.stop), exact_law.under(under, token)[None] if under else None,
            np.array([exact_law.entropy(log_p)]) if operation.entropy else None,
            exact_law.kept(log_q, operation.params.top_k)[None] if operation.kept else None)

    def _ends(self, trajectory: Trajectory, token: int, strings: tuple[str, ...] | None) -> bool:
        """Whether the token ends the sequence. Decodes the whole text, without the tables of `stop_strings`."""
        if strings is None:
            strings = self.parts.stop_strings.strings if self.parts.stop_strings else ()
        text = self.parts.tokenizer.decode([*trajectory.tokens.tolist(), token], skip_special_tokens=True) if strings else ""
        return token in self.parts.stop_ids or any(string in text for string in strings)

    def _law(self, trajectory: Trajectory, params: SamplingParams, logits: np.ndarray) -> np.ndarray:
        return exact_law.process(logits, params, trajectory.prompt, trajectory.tokens)

    def _logits(self, trajectory: Trajectory, source: str) -> tuple[np.ndarray, np.ndarray]:
        """(blended logits, logits of the source) after `trajectory`, float64 (vocabulary,)."""
        sources = self._sources(trajectory)
        return sources["blended"], sources[source]

    @torch.inference_mode()
    def _sources(self, trajectory: Trajectory) -> dict[str, np.ndarray]:
        """The logits after `trajectory` of every source, float64 (vocabulary,). `draft` is present only with a drafter."""
        tokens = torch.from_numpy(np.concatenate([trajectory.prompt, trajectory.tokens]))[None].to(self.parts.device)
        head, norm = self.model.get_output_embeddings(), self.parts.final_norm
        output, tapped = self._forward(tokens)
        states = [layer[0, -1] for layer in tapped]
        # Each term has its own head product: this engine mixes logits, and the batched engine mixes hidden states.
        # A blend comes before the model's soft-cap. `hidden_states` has the last layer's output after the final norm.
        base, softcap = output.logits[0, -1].double(), self.parts.softcap
        last = base if softcap is None else head(output.hidden_states[-1][0, -1]).double()
        drafted = self._drafted(trajectory, tokens, output.hidden_states, last) if self.drafter else None
        parts = [drafted] if self.blend.needs_draft else [head(state).double() for state in states]
        if self.companion is not None:
            first = trajectory.prompt if self.second is None else self.second[trajectory.prompt.tobytes()]
            read = torch.from_numpy(np.concatenate([first, trajectory.tokens]))[None]
            other = self.companion(input_ids=read, use_cache=False).logits[0, -1].double()
            parts = [torch.nn.functional.pad(other, (0, len(last) - len(other)), value=-torch.inf)]
            last = last.masked_fill(self.parts.forbidden, -torch.inf)
        normed = {id(part): state for part, state in zip(parts, states, strict=False)}
        blended = self.blend.mix(last, parts, lambda part: head(norm(normed[id(part)])).double())
        blended = blended if softcap is None else softcap * torch.tanh(blended / softcap)
        sources = {"blended": blended, "base": base}
        if drafted is not None:
            sources["draft"] = drafted if self._slot(trajectory) else blended
        return {name: values.masked_fill(self.parts.forbidden, -torch.inf).cpu().numpy() for name, values in sources.items()}

    def _forward(self, tokens: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """The model's output, and the outputs of the layers that the blend taps, (1, tokens, width) each.

        `hidden_states` has the last layer's output only after the final norm. Hooks give the outputs of all layers.
        """
        layers = self.parts.layers
        tapped: list[list[torch.Tensor]] = [[] for _ in self.blend.tapped_layers(len(layers))]
        hooks = [layers[layer].register_forward_hook(lambda module, arguments, output, states=states: states.append(output))
                 for layer, states in zip(self.blend.tapped_layers(len(layers)), tapped, strict=True)]
        output = self.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        return output, [states[0][0] if isinstance(states[0], tuple) else states[0] for states in tapped]

    @property
    def _draft(self) -> DFlashDrafter:
        if self.drafter is None:
            raise ValueError("this engine has no draft")
        return self.drafter

    def _slot(self, trajectory: Trajectory) -> int:
        """The slot of the token after `trajectory`."""
        return grid_slot(trajectory.length, self._draft.num_drafted + 1)

    def _drafted(self, trajectory: Trajectory, tokens: torch.Tensor, states: tuple[torch.Tensor, ...],
                 base: torch.Tensor) -> torch.Tensor:
        """Logits of the draft for the token after `trajectory`. At anchors they are the model's logits."""
        network, block = self._draft.network, self._draft.num_drafted + 1
        slot = self._slot(trajectory)
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
