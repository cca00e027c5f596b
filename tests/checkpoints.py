"""Checkpoints of small random models, with the tokenizer of the embedded model."""

import shutil
from pathlib import Path

import torch

import dflash_mcmc as dm
from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.dflash import DFlashShape
from tests.bench import random_weights
from tests.targets import random_model

_LIKELY = 4
"""Tokens that are drawn almost always, so that the blocks of a random draft are sometimes right. Half of the rows of the head
are the negative of the others, so that one of a pair always has a large logit."""


def hybrid_pair(folder: Path, family: str = "qwen3_5") -> tuple[str, ...]:
    """Writes a random target with recurrent layers, and a random DFlash draft for it. Returns the overrides that load them."""
    files = Path(dm.component("model", "tiny").path)
    model = random_model(family, vocab_size=512, max_position_embeddings=1024, eos_token_id=None)
    with torch.no_grad():
        head = model.lm_head.weight
        head[: _LIKELY // 2] *= 6.0
        head[_LIKELY // 2 : _LIKELY], head[_LIKELY:] = -head[: _LIKELY // 2], 0.0
    model.save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(files / name, folder / "target" / name)
    config = model.config
    shape = DFlashShape(
        hidden_size=config.hidden_size, num_layers=1, num_heads=4, num_key_heads=2, head_dim=8, intermediate_size=48,
        block_size=4, mask_token_id=473, target_layers=(0, 1, 2), num_target_layers=len(model.model.layers),
        rope={"rope_type": "default", "rope_theta": 1e4}, max_positions=1024, sliding=(None,), dtype=torch.float32)
    checkpoint.save(random_weights.draft(shape, torch.float32), folder / "draft", {"vocab_size": config.vocab_size})
    return "model=hf", f"model.path={folder / 'target'}", "draft=dflash", f"draft.path={folder / 'draft'}", "dataset=arith"
