"""Reads texts from pickles without unpickling. A pickle is a program, and this module executes none."""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib

_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_WITHOUT_EFFECT = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
_LARGEST = 1 << 30
"""Largest pickle in bytes: a small compressed file can expand to any size."""


def text_of(pickle: bytes) -> str:
    """The text of a pickle that holds a single text. Raises ValueError for any other pickle.

    The instructions are listed by `pickletools` and not executed. Only those that push a text or have no effect are accepted.
    """
    found = [(instruction.name, argument) for instruction, argument, _ in pickletools.genops(pickle)]
    texts = [argument for name, argument in found if name in _TEXTS]
    other = next((name for name, _ in found if name not in (*_TEXTS, *_WITHOUT_EFFECT)), None)
    if other is not None or len(texts) != 1:
        raise ValueError(f"a pickle with {other or f'{len(texts)} texts'} instead of a single text")
    return str(texts[0])


def text_of_base64(packed: str) -> str:
    """The text of a pickle that is compressed by zlib and written in base 64. Raises ValueError."""
    try:
        opened = zlib.decompressobj()
        content = opened.decompress(base64.b64decode(packed, validate=True), _LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not opened.eof:
        raise ValueError("it is cut off, or larger than 1 GiB")
    return text_of(content)
