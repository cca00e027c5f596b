"""A GGUF file as a checkpoint folder in bfloat16, which transformers loads like any other.

transformers counts a model that it has read from GGUF as quantised and refuses to save it. The dequantised weights are
therefore loaded into a model of the same configuration. Nothing in the folder depends on the version of transformers, on the
time or on the network, so that the folder's content, and the identity of runs with it, is the same on every machine.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import UserError, note

_OF_A_MACHINE = ("transformers_version", "_name_or_path", "_model_name_or_path", "local_files_only", "is_local")
"""Fields that transformers writes and no loading needs: its version, and whether the hub could be reached."""


def check_installed() -> None:
    """Raises UserError if the package `gguf` is missing, with which transformers reads the file."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("gguf: this package is not installed; allowed: pip install 'dflash-mcmc[real]', or pip install gguf")


def convert(file: Path, folder: Path) -> None:
    """Writes the checkpoint of a GGUF file to a folder: weights, tokenizer with chat template, configuration, stop ids."""
    import torch
    import transformers

    note("reading the weights of the GGUF file")
    place, name = str(file.parent), file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    read = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    values = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):
        model: Any = type(read)(type(read.config)(**values))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    note("writing the weights in bfloat16")
    model.save_pretrained(folder)
    _split_digits(file, tokenizer)
    tokenizer.save_pretrained(folder)
    for path in (folder / name for name in ("config.json", "generation_config.json", "tokenizer_config.json")):
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in _OF_A_MACHINE}
        path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def _split_digits(file: Path, tokenizer: Any) -> None:
    """Splits at every digit before words, as the file's pre-tokenizer `smollm` does. transformers reads it as GPT-2's.

    The two differ after several spaces: "is  5" is "is", "  ", "5" in SmolLM2's own tokenizer.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    kind = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
