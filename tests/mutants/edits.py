"""The list of wrong edits: `edits/*.toml`, one table for each edit.

    name      what the edit makes wrong, distinct
    file      the edited file, from the root of the repository
    old, new  a text that occurs once in the file, and the text that replaces it
    tests     files or node ids of tests that fail under the edit, the quickest first
    harmless  why no test can fail under the edit; only for edits that change no law, no record and no answer
"""

import hashlib
import tomllib
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent / "edits"


class Edit(NamedTuple):
    """A small wrong edit and the tests that should fail under it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    harmless: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the edit. Raises ValueError if `old` does not occur exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: the old text occurs {found} times in {self.file}; allowed: once")
        return text.replace(self.old, self.new)

    def digest(self, root: Path) -> str:
        """A hash of the edit, the edited file and the named test files. A stored result holds as long as it is the same."""
        files = [self.file, *(test.partition("::")[0] for test in self.tests)]
        parts = [repr(self).encode(), *((root / file).read_bytes() for file in files)]
        return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def read(folder: Path = FOLDER) -> list[Edit]:
    """All edits, in the order of the files. Raises TypeError for an unknown field, ValueError for two edits of one name."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for values in tomllib.loads(path.read_text(encoding="utf-8"))["edit"]:
            found.append(Edit(**{**values, "tests": tuple(values["tests"])}))
    names = [edit.name for edit in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two edits have one name: {', '.join(repeated)}")
    return found
