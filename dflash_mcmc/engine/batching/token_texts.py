"""The bytes that each token adds to an answer's text, read from a tokenizer. Stop strings are found in these bytes.

Two kinds of tokenizers are known. In a byte-level BPE (GPT-2, Qwen, Llama 3) each character of a token is a byte. In a
tokenizer of SentencePiece (Llama 2, Mistral, Gemma) the mark "▁" is a space, `<0x0A>` is the byte 10, and the decoder may drop
the space before the first token of a text. Special tokens add nothing, as in the text of a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.engine.batching.prompt_encoder import id_bound
from dflash_mcmc.errors import UserError

_MARK, _BYTE = "\u2581", re.compile(r"<0x([0-9A-F]{2})>")
_SAMPLES, _LENGTH = 32, 24
_TEXT = "\n\nQuestion: a  b\t1,024 don't . \u00e9\u6f22\U0001f642\r\n"
"""A text whose tokens show whether the bytes are right: spaces, line feeds, and characters of two, three and four bytes."""


class TokenTexts(NamedTuple):
    """What the tokens of a vocabulary add to a text."""

    pieces: tuple[bytes, ...]
    """By token id: the UTF-8 bytes, or a part of a character's bytes. Empty for special tokens and ids without a token."""
    first: tuple[bytes, ...] | None
    """The same for the first token of a text that has bytes. None if a token adds the same bytes at every place."""
    specials: dict[str, int]
    """Special tokens by their text, which is not part of an answer's text."""

    def joined(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a whole answer."""
        pieces = [self.pieces[token] for token in tokens]
        begin = next((number for number, piece in enumerate(pieces) if piece), None)
        if self.first is not None and begin is not None:
            pieces[begin] = self.first[tokens[begin]]
        return b"".join(pieces)

    def shown(self, tokens: Iterable[int]) -> list[bytes]:
        """The bytes of each token; those of special tokens are their names."""
        names = {number: name for name, number in self.specials.items()}
        return [names[token].encode() if token in names else self.pieces[token] for token in tokens]


def texts_of(tokenizer: Any, vocab_size: int) -> TokenTexts:
    """The bytes of a tokenizer's tokens. Raises UserError for a tokenizer of another kind.

    Args:
        tokenizer: of `transformers`.
        vocab_size: ids of the model, of which some may have no token.
    """
    names = tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, id_bound(tokenizer)))))
    added = tokenizer.added_tokens_decoder
    specials = {number: token.content for number, token in added.items() if token.special}
    specials.update({number: names[number] for number in tokenizer.all_special_ids if number < len(names)})
    of_name = _byte_level if _is_byte_level(tokenizer) else _sentence_piece
    pieces = [b"" if name is None or number in specials else of_name(name) for number, name in enumerate(names)]
    pieces += [b""] * (vocab_size - len(pieces))
    texts = TokenTexts(tuple(pieces), _first(tokenizer, pieces), {text: number for number, text in specials.items()})
    _check(tokenizer, texts, len(names))
    return texts


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    return decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))


def _alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable bytes stay, others are from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level(name: str) -> bytes:
    """A token with a character outside the alphabet stands for its own text (added tokens)."""
    known = [_ALPHABET.get(character) for character in name]
    return name.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _sentence_piece(name: str) -> bytes:
    found = _BYTE.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else name.replace(_MARK, " ").encode()


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _first(tokenizer: Any, pieces: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """The pieces of first tokens, whose leading space a decoder may drop; None if it drops none."""
    alone = [_text(tokenizer, [token]).encode() if piece.startswith(b" ") else piece for token, piece in enumerate(pieces)]
    return None if alone == list(pieces) else tuple(alone)


def _check(tokenizer: Any, texts: TokenTexts, num_tokens: int) -> None:
    """Compares the bytes with the tokenizer's own text. Raises UserError if they differ."""
    stream = np.random.default_rng(0)
    whole = [token for token in range(num_tokens) if texts.pieces[token].isascii()]
    drawn = [stream.choice(whole, _LENGTH).tolist() for _ in range(_SAMPLES)] if whole else []
    for tokens in [tokenizer.encode(_TEXT, add_special_tokens=False), *drawn]:
        if texts.joined(tokens).decode(errors="replace") != _text(tokenizer, tokens):
            raise UserError(f"dataset.stop: needs a tokenizer whose text is that of its tokens one after another; given "
                            f"{type(tokenizer).__name__} of another kind; allowed: [] with this model, or a byte-level or "
                            "SentencePiece tokenizer")
