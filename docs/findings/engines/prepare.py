"""Writes what `draw.py` needs: the crafted cases of `verify cases`, whose models serve here, both as GGUF files, and prompts.

    python prepare.py FOLDER      # a new one; needs the package gguf (pip install -e '.[real]')
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
from safetensors.torch import load_file
from transformers import AutoTokenizer

import dflash_mcmc as dm


def write_gguf(folder: Path, file: Path) -> None:
    """A Qwen3 checkpoint as a float32 GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    out = gguf.GGUFWriter(str(file), "qwen3")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    texts = json.loads((folder / "tokenizer.json").read_text())
    special = {each["id"]: each["content"] for each in texts["added_tokens"]}
    names = {number: text for text, number in texts["model"]["vocab"].items()} | special
    kinds = gguf.TokenType
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list([names.get(number, f"<unused{number}>") for number in range(config["vocab_size"])])
    out.add_token_types([int(kinds.CONTROL if number in special else kinds.NORMAL if number in names else kinds.UNUSED)
                         for number in range(config["vocab_size"])])
    out.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in texts["model"]["merges"]])
    out.add_add_bos_token(False)
    out.add_eos_token_id(json.loads((folder / "generation_config.json").read_text())["eos_token_id"][0])
    name_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        out.add_tensor(f"{name_of.get_name(stem)}.{suffix}", tensor.float().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    subprocess.run([sys.executable, "-m", "dflash_mcmc.verify", "cases", str(place)], check=True)
    for name in ("target", "assistant"):  # the embedded model, and the lower half of its layers
        write_gguf(place / name, place / f"{name}.gguf")
    tokenizer = AutoTokenizer.from_pretrained(place / "target")
    problems = Path(dm.component("model", "tiny").path).parent / "arith.jsonl"
    asked = [json.loads(line)["question"] for line in problems.read_text().splitlines()[:64]]
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
             for each in asked]
    (place / "prompts.json").write_text(json.dumps([tokenizer.encode(text, add_special_tokens=False) for text in texts]))
