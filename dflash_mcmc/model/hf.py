"""Any transformers causal language model, from a folder or by its hub name."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_mcmc.components import MISSING, Settings, identity, register, runtime
from dflash_mcmc.dataset.inputs.conversations import CLOCK, DATE, Conversation
from dflash_mcmc.errors import ConfigError, UserError, note, reason_of
from dflash_mcmc.model import Model
from dflash_mcmc.model.files import Checkpoint, DamagedError, Files, following_index, loading_quietly, wrong_rotation
from dflash_mcmc.process import http
from dflash_mcmc.tokenizer import PromptEncoder, max_positions, stated_positions

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching import language_model, plan

_TOKENIZERS = {"qwen3": ("TokenizersBackend", "Qwen2Tokenizer")}
"""Classes of tokenizers, by `model_type`, that `transformers.AutoTokenizer` takes where tokenizer_config.json names them."""

_MOST_NAMED = 4
"""Names of weights in an error."""


@register("model", "hf")
@dataclass(slots=True, kw_only=True)
class HFModel(Model):
    """Any transformers causal language model: a folder, or a name on the hub."""

    path: str = runtime(MISSING, "folder of a checkpoint, or a hub name such as Qwen/Qwen3-4B; its content is part of the "
                        "identity, but its location is not")
    revision: str | None = identity(None, "commit, tag or branch of a hub name; null takes the newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = identity(
        "auto", "precision of weights and activations; auto = the checkpoint's own")
    head_copy: bool | None = runtime(None, "keep a float32 copy of the head's weights, packed on a CPU; false multiplies the "
                                     "checkpoint's own, with float32 sums too; null = true on a CPU, where it is faster")
    chat: bool = identity(True, "format the prompt with the tokenizer's chat template; false sends the bare text")
    enable_thinking: bool = identity(False, "passed to the chat template; false closes the think block of Qwen3")
    date: str = runtime(DATE, "the date that a chat template is told which asks for the time, such as Llama 3.1's; part of "
                        "the identity for such templates alone")
    thinking: list[str] | None = runtime(None, "opening and closing mark of the model's thinking, such as [<plan>,</plan>]; "
                                         "null = those of known chat templates; part of the identity if given")
    rope_scaling: Any = identity(None, "parameters of the rotary embedding in place of the checkpoint's, such as "
                                 "{rope_type:yarn,factor:4.0}; null = the checkpoint's own")

    def check(self, config: Settings) -> None:
        """Checks that the folder exists if the path looks like a folder. Raises ConfigError."""
        self._checkpoint().check()
        try:
            datetime.strptime(self.date, "%Y-%m-%d")
        except ValueError as error:
            raise ConfigError("model.date", self.date, f"a date such as {DATE}") from error
        if self.thinking is not None and (len(self.thinking) != 2 or not all(self.thinking) or len(set(self.thinking)) < 2):
            raise ConfigError("model.thinking", self.thinking, "null, or two different marks, such as [<plan>,</plan>]")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, dict):
            raise ConfigError("model.rope_scaling", self.rope_scaling, "null, or a mapping such as {rope_type:yarn,factor:4}")

    def num_layers(self) -> int | None:
        """Number of layers in config.json; None for a hub name that is not in the cache yet. Raises ConfigError."""
        return self._checkpoint().whole_number("num_hidden_layers", "n_layer")

    def num_parameters(self) -> int | None:
        return self._checkpoint().num_parameters()

    def fingerprint(self, weights: bool = True) -> str:
        """Hash of the checkpoint's content, or of its files besides the weights; see `Checkpoint.fingerprint`.

        With the date if the chat template asks for the time, and with the marks of thinking if they are given.
        """
        folder, asks = self._checkpoint().config_folder(), False
        if self.chat:
            files = [] if folder is None else [*folder.glob("*chat_template*"), *folder.glob("*chat_template*/*"),
                                               *folder.glob("tokenizer_config.json")]
            # A hub name's tokenizer may be in no cache yet.
            texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()] if files else [
                str(getattr(self.tokenizer(), "chat_template", ""))]
            asks = any(CLOCK in text for text in texts)
        return " ".join([self._checkpoint().fingerprint(weights), *([f"date:{self.date}"] if asks else []),
                         *([f"thinking:{json.dumps(self.thinking)}"] if self.thinking else [])])

    def weights_fingerprint(self) -> str:
        """Hash of the checkpoint's weights alone; see `Checkpoint.weights_fingerprint`. Raises UserError."""
        return self._checkpoint().weights_fingerprint()

    def canonical(self, config: Settings) -> dict[str, object]:
        """The fields that have no effect here, as null. They are not part of the identity."""
        return {"revision": None, **({} if self.chat else {"enable_thinking": None}),
                **({"dtype": None, "rope_scaling": None} if config.engine.is_remote else {})}

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint("model.path", self.path, self.revision, "Qwen/Qwen3-4B")

    def shape(self, device: str) -> "plan.TargetShape | None":
        """The content of config.json; None for a hub name that is not in the cache yet. Raises UserError."""
        checkpoint = self._checkpoint()
        if self._values() is None:
            return None
        import torch
        import transformers

        from dflash_mcmc.engine.batching import plan

        config = self._config()
        if not isinstance(config.dtype, torch.dtype | None):
            raise UserError(f"model.path: given dtype {config.dtype!r:.60} in config.json of {self.path!r}; allowed: a "
                            "name such as bfloat16")
        dtype = (config.dtype or torch.float32) if self.dtype == "auto" else getattr(torch, self.dtype)
        num_parameters = checkpoint.num_parameters()
        if num_parameters is None:  # those of the architecture, without their memory
            with suppress(Exception), torch.device("meta"):  # transformers raises a dozen types where it cannot build it
                model = transformers.AutoModelForCausalLM.from_config(config)
                num_parameters = sum(weight.numel() for weight in model.parameters())
        return plan.TargetShape(config, torch.device(device), dtype, num_parameters, self.head_copy)

    def prompt_encoder(self) -> PromptEncoder | None:
        """The tokenizer, and the positions in config.json; None for a hub name that is not in the cache yet.

        PyTorch is not imported for the usual checkpoints of Qwen3. Raises UserError.
        """
        config = self._values()
        if config is None:
            return None
        positions = stated_positions(config) if self.rope_scaling is None else None
        size = config.get("vocab_size")
        return PromptEncoder(self.tokenizer(), max_positions(self._config()) if positions is None else positions,
                             size if type(size) is int else None)

    def _values(self) -> dict | None:
        """The values of config.json; None, with a note, for a hub name that is not in the cache yet. Raises ConfigError."""
        config = self._checkpoint().config()
        if config is None:
            note(f"model.path: config.json of {self.path} is not in the cache, so that draft, prompts and memory are not "
                 "checked before it is loaded")
        return config

    def _config(self) -> Any:
        """The configuration of transformers. Raises UserError."""
        return _configuration(self.path, self._checkpoint().commit(), self._rope()).get_text_config()

    def rope_override(self) -> dict[str, Any] | None:
        return self.rope_scaling

    def _rope(self) -> str | None:
        """The given parameters of the rotary embedding as JSON."""
        return None if self.rope_scaling is None else json.dumps(self.rope_scaling)

    def load(self, device: str) -> "language_model.LanguageModel":
        """The model on a device, in eval mode. It stays loaded, so the jobs of a sweep share it. Raises UserError."""
        return _load(*self._source(device))

    def _source(self, device: str) -> tuple[str, str | None, str, str, bool | None, str | None]:
        return self.path, self._checkpoint().commit(), self.dtype, device, self.head_copy, self._rope()

    def load_beside(self, device: str, use: str) -> "language_model.LanguageModel":
        """Like `load`, for a model beside the target. The latest model of each use stays loaded. Raises UserError."""
        source = self._source(device)
        model = next((model for other, model in _BESIDE.values() if other == source), None)
        if model is None:
            _BESIDE.pop(use, None)  # its memory is free before the next one is read
            model = _load.__wrapped__(*source)
        _BESIDE[use] = source, model
        return model

    def files(self, weights: bool = True) -> Files:
        self._checkpoint().check()
        return Files(self._checkpoint().local(weights), self.dtype)

    def tokenizer(self) -> Any:
        """The tokenizer alone, without the model's weights. It stays loaded, so the model shares it. Raises UserError."""
        self._checkpoint().check()
        return _tokenizer(self.path, self._checkpoint().commit())

    def render(self, tokenizer: Any, conversation: Conversation) -> str:
        if not self.chat:
            return conversation.as_text()
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"model.chat: the tokenizer of {self.path} has no chat template; allowed: false")
        return conversation.with_template(tokenizer, self.enable_thinking, self.date)


@lru_cache(maxsize=1)
def _load(path: str, revision: str | None, dtype: str, device: str, head_copy: bool | None,
          rope: str | None) -> "language_model.LanguageModel":
    import torch
    import transformers

    from dflash_mcmc.engine.batching import language_model

    transformers.utils.logging.disable_progress_bar()
    tokenizer = _tokenizer(path, revision)
    if integers := Checkpoint("model.path", path, revision, "").integers():
        more = f" and {len(integers) - 1} more" if len(integers) > 1 else ""
        raise UserError(f"model.path: given {path!r}, which has {integers[0]}{more} and no quantization_config; allowed: "
                        "weights in floating point with 16 bits or more, or the quantization_config that they belong to")
    changed = {} if rope is None else {"config": _configuration(path, revision, rope)}
    # Without a name, transformers takes sdpa, or eager for a model with attention sinks or a soft-cap.
    with loading_quietly(), _weights(path, revision) as source:
        model, loading = _pretrained(
            transformers.AutoModelForCausalLM, source, revision, **changed, output_loading_info=True,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    # transformers fills a missing weight with random numbers, and leaves out one that has no place.
    for what, names, allowed in (
            ("lacks weights of its config.json", loading["missing_keys"], "a checkpoint with every weight"),
            ("has weights that its config.json has no place for", loading["unexpected_keys"], "their own config.json"),
            ("has weights of other shapes than its config.json", loading["mismatched_keys"], "their own config.json")):
        if names:
            listed = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
            others = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
            raise UserError(f"model.path: given {path!r}, which {what}: {', '.join(listed[:_MOST_NAMED])}{others}; allowed: "
                            f"{allowed}")
    return language_model.LanguageModel(model.to(device).eval(), tokenizer, head_copy=head_copy, packs=True)


_BESIDE: "dict[str, tuple[tuple, language_model.LanguageModel]]" = {}
"""The models that are loaded beside the target, and what they were loaded from, by their use."""


@contextmanager
def _weights(path: str, revision: str | None) -> Iterator[str]:
    """What transformers reads: the path, unless a file holds a tensor that the index has elsewhere. Raises UserError."""
    folder = Checkpoint("model.path", path, revision, "").config_folder()
    if folder is None:
        yield path
        return
    try:
        with following_index(folder) as source:
            yield path if source == folder else str(source)
    except DamagedError as error:
        raise UserError(f"model.path: cannot load {path!r}: {error}; allowed: the index and the files as they were "
                        "published") from error


def _configuration(path: str, revision: str | None, rope: str | None) -> Any:
    """The configuration of transformers, with these parameters of the rotary embedding. Raises UserError."""
    import transformers

    config = _pretrained(transformers.AutoConfig, path, revision)
    if rope is not None:
        override_rope(config.get_text_config(), json.loads(rope))
    return config


@lru_cache(maxsize=2)
def _tokenizer(path: str, revision: str | None) -> Any:
    """The tokenizer, which the checks before a start and the model share; those of two models stay. Raises UserError."""
    import transformers

    tokenizer = _pretrained(getattr(transformers, _tokenizer_class(Path(path).expanduser())), path, revision)
    longest = tokenizer.model_max_length
    if not isinstance(longest, (int, float)):
        raise UserError(f"model.path: given model_max_length {longest!r:.60} in tokenizer_config.json of {path!r}; allowed: a "
                        "number of tokens")
    return tokenizer


def _tokenizer_class(folder: Path) -> str:
    """The name of a class of transformers that loads the tokenizer of a folder.

    AutoTokenizer works for every checkpoint, but imports PyTorch, which takes seconds. A start that loads no model is spared
    them where the files of a folder say which class AutoTokenizer would take.
    """
    try:
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        named = "" if "auto_map" in settings else settings["tokenizer_class"]
        return named if named in _TOKENIZERS.get(kind, ()) else "AutoTokenizer"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # AutoTokenizer reports what is wrong with the files
        return "AutoTokenizer"


def _pretrained(kind: Any, path: str, revision: str | None, **settings):
    """The object that transformers loads from a folder or by a hub name. Raises UserError."""
    folder = Path(path).expanduser()
    offline = not folder.is_dir() and not http.reachable()
    try:
        return kind.from_pretrained(str(folder) if folder.is_dir() else path, revision=revision, local_files_only=offline,
                                    trust_remote_code=False, **settings)
    except Exception as error:  # transformers raises a dozen types here; all mean that this checkpoint cannot be used
        if offline:
            raise Checkpoint("model.path", path, revision, "").unreachable() from error
        reason = reason_of(error, 300)
        raise UserError(f"model.path: cannot load {path!r}: {type(error).__name__}: {reason}") from error


_ROPE = "model.rope_scaling"
_KEPT_OF_ROPE = ("rope_theta", "partial_rotary_factor")
"""Parameters that stay unless they are given."""


def override_rope(config: Any, given: Mapping[str, Any]) -> None:
    """Sets the parameters of the rotary embedding.

    Args:
        config: the text configuration of `transformers`, which is changed.
        given: the parameters, such as rope_type and factor; or those of each type of layer, by its name, for a model that has
            several embeddings (Gemma 3, OLMo 3). `original_max_position_embeddings` is by default the configuration's length.

    Raises:
        ConfigError: for a model without such an embedding, or parameters that `transformers` refuses.
    """
    before = getattr(config, "rope_parameters", None)
    if not before:
        raise ConfigError(_ROPE, dict(given), "null for a model without a rotary embedding")
    nested = {name for name, value in before.items() if isinstance(value, dict)}
    if nested and not set(given) <= nested:
        raise ConfigError(_ROPE, dict(given), f"parameters for each of {', '.join(sorted(nested))}, as in "
                          f"{{{min(nested)}:{{rope_type:yarn,factor:4.0}}}}")
    after = {**before, **{name: _merged_rope(given, before[name], given[name]) for name in given}} if nested else (
        _merged_rope(given, before, given))
    config.rope_parameters = after
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(_ROPE, dict(given), f"what transformers accepts ({reason_of(error, 200)})") from error


def _merged_rope(whole: Mapping[str, Any], before: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """The parameters of one embedding. Raises ConfigError for a name or a type that `transformers` does not have."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    names, kinds = sorted(RopeParameters.__annotations__), sorted({"default", *ROPE_INIT_FUNCTIONS})
    if not isinstance(parameters, Mapping) or not set(parameters) <= set(names):
        raise ConfigError(_ROPE, dict(whole), f"a mapping with {', '.join(names)}")
    if parameters.get("rope_type") not in kinds:
        raise ConfigError(_ROPE, dict(whole), f"a rope_type of {', '.join(kinds)}")
    if wrong := wrong_rotation({"rope_scaling": parameters}):
        raise ConfigError(_ROPE, dict(whole), f"for {wrong[0].removeprefix('rope_scaling.')}, {wrong[2]}")
    return {**{name: before[name] for name in _KEPT_OF_ROPE if before.get(name) is not None}, **parameters}
