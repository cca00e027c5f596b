"""Makes torchvision importable beside a PyTorch without CUDA, for vLLM's classes that import it:

    python -m tests.vllm.torchvision_on_a_cpu FOLDER     FOLDER was filled by pip install --no-deps --target FOLDER torchvision

The package index has builds for CUDA alone. Their operators cannot be loaded, and torchvision fails where it refers to them.
This command adds declarations of the operators, which no text model calls, to that copy. It changes nothing else.
"""

import re
import sys
from pathlib import Path

_MARK = "# operators declared by dflash_mcmc"


def declare(folder: Path) -> None:
    """Adds the declarations to `folder`/torchvision, once."""
    package = folder / "torchvision"
    start, text = package / "__init__.py", (package / "_meta_registrations.py").read_text()
    if start.read_text().startswith(_MARK):
        return
    patterns = (r'register_meta\("(\w+)"\)', r'register_fake\("torchvision::(\w+)"\)')
    names = sorted({name for pattern in patterns for name in re.findall(pattern, text)})
    lines = [_MARK, "import torch", '_declared = torch.library.Library("torchvision", "DEF")',
             *(f'_declared.define("{name}(Tensor x) -> Tensor")' for name in names)]
    start.write_text("\n".join([*lines, start.read_text()]))


if __name__ == "__main__":
    declare(Path(sys.argv[1]))
