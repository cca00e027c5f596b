"""Packs the runs of an experiment into one file of docs/findings/records: `python docs/findings/pack.py outputs/study_code`.

The file is a tar archive with xz. Runs of probes are in it too. Absolute paths in `run.json` and `config.yaml` are shortened
to their last part, since they name folders of the machine that made the runs. Records and problems are as they are. The
archive has no times and no owners: equal runs make equal bytes.
"""

import io
import re
import sys
import tarfile
from pathlib import Path

KEPT = ("config.yaml", "run.json", "problems.jsonl", "records*.jsonl", "summary.json")
"""Patterns of the files of a run. Two processes that share a run write a file of records each."""
_PATH = re.compile(r"(?<![\w./:])(?:/[\w.+-]+)+/(?=[\w.+-])")
"""An absolute path up to its last part."""


def main(folder: Path) -> None:
    target = Path(__file__).parent / "records" / f"{folder.name}.tar.xz"
    target.parent.mkdir(exist_ok=True)
    runs = sorted(path.parent for path in folder.glob("*/records.jsonl"))
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in (path for run in runs for pattern in KEPT for path in sorted(run.glob(pattern))):
            data = path.read_bytes()
            if path.name in ("config.yaml", "run.json"):
                data = _PATH.sub("", data.decode()).encode()
            member = tarfile.TarInfo(str(path.relative_to(folder.parent)))
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    print(f"{target.name}: {len(runs)} runs, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
