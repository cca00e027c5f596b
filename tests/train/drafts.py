"""Small targets, drafts and sequences for the tests of training."""

import numpy as np
import torch

from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.train.loss import Response
from tests.targets import random_model

BLOCK_SIZE = 5


def random_target() -> LanguageModel:
    """A small random target with 61 ids. The last three have no token."""
    model = LanguageModel(random_model())
    model.forbid([58, 59, 60])
    return model


def random_draft(model: LanguageModel) -> DFlash:
    """A random draft of two layers that reads two of the target's three layers.

    The weights of its norms are random too, so that a missing norm changes the result.
    """
    shape = DFlashShape(
        hidden_size=32, num_layers=2, num_heads=4, num_key_heads=2, head_dim=8, intermediate_size=24, block_size=BLOCK_SIZE,
        mask_token_id=60, target_layers=(0, 1), num_target_layers=3, rope={"rope_type": "default", "rope_theta": 10_000.0},
        max_positions=192, sliding=(None, None),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        draft = DFlash(shape)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator)
            parameter.add_(noise) if parameter.dim() == 1 else parameter.copy_(noise)
    return draft


def random_responses(lengths: tuple[int, ...], prompt_length: int = 4) -> list[Response]:
    """Responses of random tokens with the given lengths, which include the prompt."""
    numbers = np.random.default_rng(0)
    return [Response(numbers.integers(0, 58, length).astype(np.int32), prompt_length) for length in lengths]


def block_alone(draft: DFlash, model: LanguageModel, tokens: torch.Tensor, anchor: int) -> torch.Tensor:
    """Logits (block_size - 1, ids) of one block, with a forward of the target over only the tokens before its anchor."""
    with model.tapped(draft.shape.target_layers) as outputs:
        model.decoder(input_ids=tokens[None, :anchor], use_cache=False)
    keys, values = draft.keys_values(draft.context(torch.cat(outputs, dim=-1).detach()), torch.arange(anchor)[None])
    ids = torch.tensor([[int(tokens[anchor]), *[draft.shape.mask_token_id] * (draft.shape.block_size - 1)]])

    def attend(layer, queries, own_keys, own_values):
        all_keys, all_values = torch.cat((keys[layer], own_keys), dim=2), torch.cat((values[layer], own_values), dim=2)
        return torch.nn.functional.scaled_dot_product_attention(queries, all_keys, all_values, enable_gqa=True)

    positions = anchor + torch.arange(draft.shape.block_size)[None]
    hidden = draft(model.decoder.get_input_embeddings()(ids).detach(), positions, attend)
    return model.logits(hidden[0, 1:])
