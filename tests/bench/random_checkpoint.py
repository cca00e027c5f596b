"""Writes a checkpoint with random weights, for runs at the shape of a model whose weights are not here.

    python -m tests.bench.random_checkpoint outputs/random/target --config Qwen3-4B/config.json --tokenizer Qwen3-4B
    python -m tests.bench.random_checkpoint outputs/random/draft --config Qwen3-4B-DFlash-b16/config.json

Time and memory are those of the real model. Texts, acceptance and accuracy mean nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.checkpoint import DFLASH
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.process import program
from tests.bench import random_weights

_DRAFT = "DFlashDraftModel"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                    "chat_template.jinja")


def write(folder: Path, config: Path, tokenizer: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a target of transformers, or a DFlash draft, as its `config.json` describes it. Raises UserError.

    Args:
        folder: the new folder.
        config: a config.json.
        tokenizer: the folder of the target's tokenizer; None for a checkpoint without one.
    """
    if folder.exists():
        raise ConfigError("folder", str(folder), "a folder that does not exist yet")
    try:
        values = json.loads(config.read_text())
        architectures = values.get("architectures") or ()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("--config", str(config), "the config.json of a checkpoint") from error
    if _DRAFT in architectures:
        made = random_weights.draft(DFLASH.read_shape(config.parent), dtype)
        checkpoint.save(made, folder, {"vocab_size": values.get("vocab_size")})
    else:
        _write_target(folder, config, dtype)
    for name in _TOKENIZER_FILES if tokenizer is not None else ():
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _write_target(folder: Path, config: Path, dtype: torch.dtype) -> None:
    import transformers

    try:
        values = transformers.AutoConfig.from_pretrained(str(config.parent))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--config: {config}: {' '.join(str(error).split())[:200]}") from error
    random_weights.target(values, dtype).save_pretrained(folder)


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m tests.bench.random_checkpoint",
                                   description="Writes a checkpoint with random weights.")
    parser.add_argument("folder", type=Path, help="the new folder")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE",
                        help="config.json of a target or of a DFlash draft")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="folder of the target's tokenizer")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args(arguments)
    write(given.folder, given.config, given.tokenizer, getattr(torch, given.dtype))


if __name__ == "__main__":
    main()
