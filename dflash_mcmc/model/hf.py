"""Any transformers causal language model, from a folder or by its hub name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc import hub
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config import Config
    from dflash_mcmc.engine.language_model import LanguageModel

_SMALL_FILES = (".json", ".txt", ".jinja", ".model")
_SAMPLE_BYTES = 4096


@register("model", "hf")
@dataclass(slots=True, kw_only=True)
class HFModel:
    """Any transformers causal language model with full attention: a folder, or a name on the hub."""

    path: str = runtime("folder of a checkpoint, or a hub name such as Qwen/Qwen3-4B; what is in it is part of the "
                        "identity, where it lies is not")
    revision: str | None = identity("commit, tag or branch of a hub name; null takes the newest")
    dtype: str = identity("precision of weights and activations; auto = the checkpoint's own",
                          choices=("auto", "float32", "bfloat16", "float16"))
    chat: bool = identity("ask through the tokenizer's chat template; false gives the bare text")
    enable_thinking: bool = identity("passed to the chat template; false closes the think block of Qwen3")

    def check(self, config: Config) -> None:
        """A path that looks like a folder must be one. Raises ConfigError."""
        folder = self._folder()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ConfigError("model.path", self.path, "a folder with config.json, weights and tokenizer")
        elif self.path.startswith(("/", ".", "~")) or self.path.count("/") > 1:
            raise ConfigError("model.path", self.path, "a folder that exists, or a hub name such as Qwen/Qwen3-4B")

    def num_layers(self) -> int | None:
        """Of the checkpoint's config.json; None for a hub name that is not in the cache yet. Raises ConfigError."""
        config = self._folder() / "config.json" if self._folder().is_dir() else self._cached("config.json")
        if config is None:
            return None
        try:
            values = json.loads(config.read_text())
        except ValueError as error:
            raise ConfigError("model.path", self.path, f"a folder whose config.json is JSON ({error})") from error
        return values.get("num_hidden_layers") or values.get("n_layer")

    def fingerprint(self) -> str:
        """Hash of the checkpoint's files; of name and commit for a hub name.

        Of a safetensors file its header counts and three samples of every tensor: reading all of a large checkpoint
        would take minutes at every start, and a tensor that was trained further differs in any sample.
        """
        if not self._folder().is_dir():
            return f"hub:{self.path}@{self.commit()}"
        digest = hashlib.sha256()
        for file in sorted(self._folder().iterdir()):
            if file.suffix in _SMALL_FILES:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
            elif file.suffix == ".safetensors":
                digest.update(file.name.encode() + b"\0" + _sample(file))
            elif file.suffix in (".bin", ".pt"):
                digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()[:32]

    def commit(self) -> str | None:
        """Commit of a hub name: that of the cache, or the hub's; the revision as given where neither can be asked."""
        if self._folder().is_dir():
            return self.revision
        cached = self._cached("config.json")
        if cached is not None:
            return cached.parent.name
        if not hub.reachable():
            return self.revision
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return HfApi().model_info(self.path, revision=self.revision, timeout=30).sha
        except HfHubHTTPError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError("model.path", self.path, f"a model that the hub has and lets you read ({reason})") from error

    def canonical(self, config: Config) -> dict[str, object]:
        """Fields that have no effect here are not part of the identity."""
        return {"revision": None, **({} if self.chat else {"enable_thinking": None})}

    def _folder(self) -> Path:
        return Path(self.path).expanduser()

    def _cached(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(self.path, file, revision=self.revision)
        except HFValidationError as error:
            raise ConfigError("model.path", self.path, "a folder that exists, or a hub name such as Qwen/Qwen3-4B") from error
        return Path(found) if isinstance(found, str) else None

    def load(self, device: str) -> LanguageModel:
        """The model on a device, in eval mode. Kept: the jobs of a sweep share it. Raises UserError."""
        return _load(self.path, self.commit(), self.dtype, device)

    def prompt(self, tokenizer: object, text: str) -> str:
        """The text that the model is given for a question."""
        if not self.chat:
            return text
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"model.chat: the tokenizer of {self.path} has no chat template; allowed: false")
        return tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                             add_generation_prompt=True, enable_thinking=self.enable_thinking)


def _sample(file: Path) -> bytes:
    """Header, and the begin, middle and end of every tensor of a safetensors file. Raises ConfigError."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if length < size else b""
        try:
            tensors = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("model.path", str(file), "a safetensors file that is whole") from error
        digest = hashlib.sha256(header + str(size).encode())
        for begin, end in tensors.values():
            for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                opened.seek(8 + length + offset)
                digest.update(opened.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.digest()


@lru_cache(maxsize=1)
def _load(path: str, revision: str | None, dtype: str, device: str) -> LanguageModel:
    import torch
    import transformers

    from dflash_mcmc.engine.language_model import LanguageModel

    transformers.utils.logging.disable_progress_bar()
    folder = Path(path).expanduser()
    offline = not folder.is_dir() and not hub.reachable()
    source = str(folder) if folder.is_dir() else path
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, revision=revision, local_files_only=offline)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, revision=revision, dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation="sdpa", local_files_only=offline,
        )
    except Exception as error:  # transformers raises a dozen types here; all mean that this checkpoint cannot be used
        if offline:
            raise UserError(f"model.path: given {path!r}, which is no folder here and not in the cache, and the hub cannot be "
                            "reached; allowed: the folder of a downloaded checkpoint, model.path=/path/to/folder") from error
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.path: cannot load {path!r}: {type(error).__name__}: {reason}") from error
    return LanguageModel(model.to(device).eval(), tokenizer)
