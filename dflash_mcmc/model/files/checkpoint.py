"""A checkpoint: a folder or a name on the hub, the hash of its content, its size, its stop ids, and the names of precisions.

The size is read from the configuration and from the headers of the weights. No weight is loaded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mcmc.errors import ConfigError, UserError, reason_of
from dflash_mcmc.model.files import pretrained, weight_files
from dflash_mcmc.process import hub

PRECISIONS = ("float32", "bfloat16", "float16")
"""Names of PyTorch's types that models and drafts can be loaded in."""


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
        elif self.path.startswith(("/", ".", "~")) or self.path.count("/") > 1:
            raise ConfigError(self.field, self.path, f"a folder that exists, or a hub name such as {self.example}"
                              f"{pretrained.hint(self.folder)}")

    def config(self) -> dict | None:
        """Values of config.json; None for a hub name that is not in the cache yet. Raises ConfigError."""
        file = self.folder / "config.json" if self.folder.is_dir() else self._cached("config.json")
        return None if file is None else self._values(file)

    def whole_number(self, *names: str) -> int | None:
        """The first of these fields of config.json that is there; None if none is. Raises ConfigError unless it is a count."""
        values = self.config() or {}
        given = next((values[name] for name in names if values.get(name)), None)
        if given is not None and (type(given) is not int or given < 1):
            raise ConfigError(self.field, self.path, f"a folder whose config.json has a whole number > 0 for {names[0]}, "
                              f"and not {given!r:.40}")
        return given

    def config_folder(self) -> Path | None:
        """The folder that holds config.json. For a hub name it is in the cache; None if the cache does not have it yet."""
        file = self.folder / "config.json" if self.folder.is_dir() else self._cached("config.json")
        return None if file is None else file.parent

    def num_parameters(self) -> int | None:
        """Number of parameters, from the headers of the safetensors files; None if a file is not on this machine.

        Raises ConfigError for a corrupt file.
        """
        folder = self.config_folder()
        if folder is None:
            return None
        whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        files = [whole] if whole.is_file() or not index.is_file() else self._listed(index)
        return sum(map(self._numbers_in, files)) if all(file.is_file() for file in files) else None

    def fingerprint(self) -> str:
        """A hash of the checkpoint's files. For a hub name it is the name and the commit. Raises ConfigError.

        The hash covers the header of a safetensors file and three samples of every tensor. Reading all of a large
        checkpoint would take minutes at every start, and a tensor that was trained further differs in any sample.
        """
        if not self.folder.is_dir():
            return f"hub:{self.path}@{self.commit()}"
        digest = hashlib.sha256()
        for file in _files(self.folder, self.field):
            if file.suffix in _SMALL_FILES:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
            elif file.suffix == ".safetensors":
                digest.update(file.name.encode() + b"\0" + self._sample(file))
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
            reason = reason_of(error, 200)
            allowed = f"a checkpoint that exists on the hub and that you may read ({reason})"
            raise ConfigError(self.field, self.path, allowed) from error

    def unreachable(self) -> UserError:
        """The error for a hub name that is not in the cache while the hub cannot be reached."""
        return UserError(f"{self.field}: given {self.path!r}, which is no folder here and not in the cache, and the hub "
                         f"cannot be reached; allowed: the folder of a downloaded checkpoint, {self.field}=/path/to/folder")

    def local(self) -> Path:
        """The folder, downloaded if necessary. Raises UserError."""
        if self.folder.is_dir():
            return self.folder
        import huggingface_hub

        offline = not hub.reachable()
        try:
            return Path(huggingface_hub.snapshot_download(self.path, revision=self.commit(), local_files_only=offline))
        except Exception as error:  # the hub raises a dozen types here; all mean that this checkpoint cannot be loaded
            if offline:
                raise self.unreachable() from error
            reason = reason_of(error)
            raise UserError(f"{self.field}: cannot load {self.path!r}: {type(error).__name__}: {reason}") from error

    def _cached(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(self.path, file, revision=self.revision)
        except HFValidationError as error:
            raise ConfigError(self.field, self.path, f"a folder that exists, or a hub name such as {self.example}") from error
        return Path(found) if isinstance(found, str) else None

    def _listed(self, index: Path) -> list[Path]:
        """The files of an index. Raises ConfigError."""
        try:
            return weight_files.files_of_index(index)
        except weight_files.DamagedError as error:
            raise ConfigError(self.field, str(index), f"a complete index of safetensors files ({error})") from error

    def _numbers_in(self, file: Path) -> int:
        """Numbers in a safetensors file. Raises ConfigError."""
        return sum(math.prod(tensor.shape) for tensor in self._header(file)[1])

    def _sample(self, file: Path) -> bytes:
        """Header, and the beginning, middle and end of every tensor of a safetensors file. Raises ConfigError."""
        header, tensors = self._header(file)
        digest = hashlib.sha256(header + str(file.stat().st_size).encode())
        for sample in self._samples(file, len(header), tensors):
            digest.update(sample)
        return digest.digest()

    def _samples(self, file: Path, header_bytes: int, tensors: list[weight_files.Stored]) -> Iterator[bytes]:
        """The beginning, middle and end of every tensor of a safetensors file, joined."""
        with file.open("rb") as opened:
            for tensor in tensors:
                begin, end, parts = tensor.begin, tensor.end, []
                for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    opened.seek(8 + header_bytes + offset)
                    parts.append(opened.read(min(_SAMPLE_BYTES, end - offset)))
                yield b"".join(parts)

    def _header(self, file: Path) -> tuple[bytes, list[weight_files.Stored]]:
        """The header of a safetensors file, and its tensors. Raises ConfigError."""
        try:
            with file.open("rb") as opened:
                return weight_files.read_header(opened, file)
        except weight_files.DamagedError as error:
            raise ConfigError(self.field, str(file), f"a complete safetensors file ({error})") from error

    def _values(self, file: Path) -> dict[str, Any]:
        """The mapping in a JSON file. Raises ConfigError."""
        try:
            values = weight_files.read_json(file.read_bytes())
        except weight_files.DamagedError as error:
            raise ConfigError(self.field, self.path, f"a folder whose {file.name} is JSON ({error})") from error
        if not isinstance(values, dict):
            found = type(values).__name__
            raise ConfigError(self.field, self.path, f"a folder whose {file.name} is a mapping, and no {found}")
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


class CheckpointSize(NamedTuple):
    """The size of a target or a draft. A value is None if it is not known without loading the checkpoint."""

    name: str | None = None
    """The hub name, or the name of the folder."""
    parameters: int | None = None
    """Stored parameters; a head that shares the weights of the embedding counts once."""
    hidden_size: int | None = None
    num_layers: int | None = None
    reads_layers: tuple[int, ...] = ()
    """The target's layers that a draft reads."""


def size_of(checkpoint: Checkpoint) -> CheckpointSize:
    """The size of a checkpoint in a folder or in the cache of the hub. Raises ConfigError for a damaged config.json."""
    values, folder = checkpoint.config(), checkpoint.config_folder()
    if values is None or folder is None:
        return CheckpointSize(checkpoint.path)
    name = folder.resolve().name if checkpoint.folder.is_dir() else checkpoint.path
    return CheckpointSize(name, checkpoint.num_parameters(), checkpoint.whole_number("hidden_size", "n_embd"),
                          checkpoint.whole_number("num_hidden_layers", "n_layer"))
