"""Parameter counts of target and draft by component: the document `deep_readout_diagnostic`, section 4.1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from dflash_mcmc.store.bounds import Count

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.draft.network.dflash import DFlash
    from dflash_mcmc.engine.batching.language_model import LanguageModel


class ParameterCounts(TypedDict):
    """Numbers of parameters of target and draft, and the sizes that the diagram needs, as JSON values."""

    target_layers: Count
    embedding: Count
    head: Count
    tied: bool
    """Whether the head has the weights of the embedding."""
    target_other: Count
    draft_fc: Count
    draft_layers: Count
    draft_norms: Count
    num_target_layers: Count
    num_draft_layers: Count
    tapped_layers: list[Count]
    hidden_size: Count
    words: Count
    """Number of tokens in the vocabulary."""


def count_parameters(model: LanguageModel, network: DFlash) -> ParameterCounts:
    """Parameters by component, and the sizes that the diagram needs, as JSON values.

    `target_other` counts the final norm and all other parameters, such as a table of positions. A tied head is counted in
    `head` too, although it is the embedding.
    """
    embedding, head, shape = model.decoder.get_input_embeddings().weight, model.head, network.shape
    layers, tied = _count([model.layers]), head.weight is embedding
    whole = _count([model.decoder, head])
    head_only = _count([head])
    return {
        "target_layers": layers, "embedding": embedding.numel(), "head": head_only, "tied": tied,
        "target_other": whole - layers - embedding.numel() - (head_only - embedding.numel() if tied else head_only),
        "draft_fc": _count([network.fc]), "draft_layers": _count([network.layers]),
        "draft_norms": _count([network.hidden_norm, network.norm]),
        "num_target_layers": len(model.layers), "num_draft_layers": len(network.layers),
        "tapped_layers": list(shape.target_layers), "hidden_size": shape.hidden_size,
        "words": model.vocab_size - int(model.forbidden.sum()),
    }


def parameter_rows(counts: ParameterCounts) -> list[dict]:
    """The document's table: component, parameters, ratio to the target's layers, and role."""
    taps, hidden, tied = len(counts["tapped_layers"]), counts["hidden_size"], counts["tied"]
    named = [
        (f"target: {counts['num_target_layers']} layers", counts["target_layers"], "deep processing"),
        ("target: embedding", counts["embedding"], "shared with the draft"),
        ("target: head", counts["head"], "shared with the draft" + (", same weights as the embedding" if tied else "")),
        ("target: other", counts["target_other"], "final norm, and positions if they are learned"),
        (f"draft: fc ({taps * hidden} to {hidden})", counts["draft_fc"], f"linear, {taps} to 1"),
        (f"draft: {counts['num_draft_layers']} layers", counts["draft_layers"], "read the features"),
        ("draft: norms", counts["draft_norms"], "after fc and at the end"),
    ]
    return [{"component": component, "parameters": number, "of_target_layers": number / counts["target_layers"], "role": role}
            for component, number, role in named]


def configuration(counts: ParameterCounts) -> dict[str, object]:
    """The columns of the table of configuration that describe target and draft; a tied head counts once."""
    head = 0 if counts["tied"] else counts["head"]
    return {"target_parameters": counts["target_layers"] + counts["embedding"] + head + counts["target_other"],
            "draft_parameters": counts["draft_fc"] + counts["draft_layers"] + counts["draft_norms"],
            "hidden_size": counts["hidden_size"], "target_layers": counts["num_target_layers"],
            "draft_layers": counts["num_draft_layers"], "reads_layers": ", ".join(map(str, counts["tapped_layers"]))}


def _count(modules: Iterable[torch.nn.Module]) -> int:
    """Number of parameters of the modules; shared parameters count once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
