"""The ids of a prompt, the texts and bytes of tokens, and the longest sequence of a model, without the model's weights.

PyTorch is not imported, since its import takes seconds.

Two kinds of tokenizers have known bytes. In a byte-level BPE (GPT-2, Qwen, Llama 3) each character of a token is a byte. In a
tokenizer of SentencePiece (Llama 2, Mistral, Gemma) the mark U+2581 is a space, and `<0x0A>` is the byte 10. Special tokens
add nothing, except those that mark thinking, as in the text of a record (`continuation`).
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import THINKING

GROWING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that change for all positions when the longest sequence of a batch exceeds the original length."""
_STATED = "qwen3"
"""The `model_type` whose config.json `stated_positions` reads."""
_ROPE_FIELDS = ("rope_parameters", "rope_scaling")
_ALWAYS_READ = 1_000_000
"""Characters of a text that is tokenized in any case."""
_WITHOUT_POSITIONS = 2**24
"""Characters of a text for a model without a limit of positions."""
_COMPOSED = 4
"""Characters that Unicode's normal form C can compose to one, at most."""
_MARK, _BYTE = "\u2581", re.compile(r"<0x([0-9A-F]{2})>")
_SAMPLES, _LENGTH = 32, 24
_TEXT = "\n\nQuestion: a  b\t1,024 don't . \u00e9\u6f22\U0001f642\r\n"
"""A text whose tokens show whether the bytes are right: spaces, line feeds, and characters of two, three and four bytes."""


class PromptEncoder(NamedTuple):
    """The attributes of `LanguageModel` that encode a prompt, under the same names."""

    tokenizer: Any
    """The tokenizer of `transformers`."""
    max_positions: int | None
    """Longest sequence of the model, prompt included; None without a limit."""
    vocab_size: int | None = None
    """Ids that the model knows; None if the configuration does not state them here."""

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids of a prompt, int64, as `LanguageModel.encode` gives them."""
        return encode(self.tokenizer, text, add_special_tokens, self.max_positions, self.vocab_size)


def id_bound(tokenizer: Any) -> int:
    """One more than the largest id of a tokenizer. `len(tokenizer)` counts tokens, and is too small where ids have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def ids_of(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """The token ids of a text. The first special token (bos) is not added to a text that begins with it already.

    Args:
        text: a `PromptText` has names of special tokens that stay text.
    """
    tokens, end = [], 0
    for start, stop in getattr(text, "plain", ()):
        tokens += tokenizer(text[end:start], add_special_tokens=False)["input_ids"]
        tokens += tokenizer(text[start:stop], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        end = stop
    tokens += tokenizer(text[end:], add_special_tokens=add_special_tokens and not end)["input_ids"]
    bos = getattr(tokenizer, "bos_token_id", None)
    doubled = add_special_tokens and bos is not None and list(tokens[:2]) == [bos, bos]
    return list(tokens[1:] if doubled else tokens)


def continuation(tokenizer: Any, tokens: Sequence[int], **options: Any) -> str:
    """The text that tokens add to a text before them, without special tokens, except those that mark thinking.

    A decoder of SentencePiece (Llama 2, Mistral) drops the space before the first token of a text. Here that token follows
    others, so it is decoded behind itself, and the text of the first of the two is left out.
    """
    marks, hidden = marks_of(tokenizer), set[int]()
    if marks:  # the decoder can leave out all special tokens or none
        added = getattr(tokenizer, "added_tokens_decoder", {})
        hidden = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)} - marks
    options = {"skip_special_tokens": not marks, **options}
    tokens = [token for token in tokens if token not in hidden]
    for first in tokens:
        marked = str(tokenizer.convert_ids_to_tokens(first)).startswith(_MARK)
        if marked or tokenizer.decode([first], **options):  # else a special token
            break
    if not tokens or not marked:
        return tokenizer.decode(tokens, **options)
    return tokenizer.decode([first, *tokens], **options)[len(tokenizer.decode([first], **options)):]


@functools.lru_cache(maxsize=4)
def marks_of(tokenizer: Any) -> frozenset[int]:
    """The special tokens that are in marks of thinking, such as Mistral's `[THINK]`: without them a thinking has no end."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token_id for token_id, token in added.items()
                     if token.special and token.content and any(token.content in mark for pair in THINKING for mark in pair))


def encode(tokenizer: Any, text: str, add_special_tokens: bool, positions: int | None, vocab_size: int | None) -> np.ndarray:
    """Token ids of a text, int64.

    Args:
        positions: longest sequence of the model; None without a limit.
        vocab_size: ids that the model knows; None if they are not known.

    Raises:
        UserError: for a text that is too long for the tokenizer, or has a token that the model does not know.
    """
    _check_length(tokenizer, text, positions)
    tokens = np.array(ids_of(tokenizer, text, add_special_tokens), dtype=np.int64)
    if vocab_size is not None and len(tokens) and tokens.max() >= vocab_size:
        raise UserError(f"model.path: given a tokenizer of {id_bound(tokenizer)} tokens, which gives the id {tokens.max()} "
                        f"for a prompt; allowed: ids from 0 to {vocab_size - 1}, the model's vocabulary")
    return tokens


def _check_length(tokenizer: Any, text: str, positions: int | None) -> None:
    """Raises UserError for a text that cannot fit into the positions, without the tokenizer, which a huge text aborts."""
    if len(text) <= _ALWAYS_READ:
        return
    longest, allowed = max(map(len, tokenizer.get_vocab())), _WITHOUT_POSITIONS
    if positions is not None:
        allowed = max(_ALWAYS_READ, _COMPOSED * longest * positions)
    if len(text) > allowed:
        limit = "the most that is tokenized" if positions is None else (
            f"since the model has {positions:,} positions and a token at most {longest} characters")
        raise UserError(f"prompt: given a text of {len(text):,} characters; allowed: at most {allowed:,} characters, {limit}")


def max_positions(config: Any) -> int | None:
    """Longest sequence of a model with this configuration; None without a limit.

    A growing rotary embedding is limited to its original length. YaRN extends it by a factor (Peng et al. 2023, arXiv
    2309.00071), even if the configuration does not state the extended length.
    """
    length = getattr(config, "max_position_embeddings", None)
    for rope in ropes_of(config):
        original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if original is None:
            continue
        if rope.get("rope_type") in GROWING_ROPES:
            length = original if length is None else min(length, original)
        elif rope.get("rope_type") == "yarn" and length is not None and rope.get("factor"):
            length = max(length, int(original * rope["factor"]))
    return length


def ropes_of(config: Any) -> list[dict]:
    """The parameters of a configuration's rotary embeddings: of one for all layers, or of one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in parameters.values() if isinstance(rope, dict)]
    return nested or ([parameters] if parameters else [])


def stated_positions(values: dict[str, Any]) -> int | None:
    """`max_positions` of a config.json that states it; None where only the configuration of `transformers` knows it.

    A field that is absent has a default in `transformers`, and some fields have several spellings. Therefore only the usual
    config.json of Qwen3 is read here: a length, no window, and a rotary embedding without scaling.
    """
    length = values.get("max_position_embeddings")
    ropes = [values.get(name) or {} for name in _ROPE_FIELDS]
    plain = (values.get("model_type") == _STATED and type(length) is int and values.get("use_sliding_window", False) is False
             and not any(isinstance(value, dict) for name, value in values.items() if name not in _ROPE_FIELDS)
             and all(isinstance(rope, dict) and set(rope) <= {"rope_type", "rope_theta"} for rope in ropes)
             and all(rope.get("rope_type", "default") == "default" for rope in ropes))
    return max_positions(SimpleNamespace(max_position_embeddings=length, use_sliding_window=False)) if plain else None


class TokenTexts(NamedTuple):
    """What the tokens of a vocabulary add to a text."""

    pieces: tuple[bytes, ...]
    """By token id: the UTF-8 bytes, or a part of a character's bytes. Empty for special tokens and ids without a token."""
    specials: dict[str, int]
    """Special tokens by their text, which is not part of an answer's text."""

    def joined(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a whole answer."""
        return b"".join(self.pieces[token] for token in tokens)

    def shown(self, tokens: Iterable[int]) -> list[bytes]:
        """The bytes of each token; those of special tokens are their names."""
        names = {token_id: name for name, token_id in self.specials.items()}
        return [names[token].encode() if token in names else self.pieces[token] for token in tokens]


def texts_of(tokenizer: Any, vocab_size: int) -> TokenTexts:
    """The bytes of a tokenizer's tokens. Raises UserError for a tokenizer of another kind.

    Args:
        tokenizer: of `transformers`.
        vocab_size: ids of the model, of which some may have no token.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, id_bound(tokenizer)))))
    added = tokenizer.added_tokens_decoder
    specials = {token_id: token.content for token_id, token in added.items() if token.special}
    specials.update({token_id: names[token_id] for token_id in tokenizer.all_special_ids if token_id < len(names)})
    marks = marks_of(tokenizer)
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    of_name = functools.partial(_byte_level, alphabet) if _is_byte_level(tokenizer) else _sentence_piece
    pieces = [name.encode() if name and token_id in marks else b"" if name is None or token_id in specials else of_name(name)
              for token_id, name in enumerate(names)]
    pieces += [b""] * (vocab_size - len(pieces))
    texts = TokenTexts(tuple(pieces), {text: token_id for token_id, text in specials.items()})
    _check_texts(tokenizer, texts, len(names))
    return texts


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    return decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))


def _byte_level(alphabet: Mapping[str, int], name: str) -> bytes:
    """A token with a character outside the alphabet stands for its own text (added tokens)."""
    codes = [alphabet.get(character) for character in name]
    return name.encode() if None in codes else bytes(byte for byte in codes if byte is not None)


def _sentence_piece(name: str) -> bytes:
    match = _BYTE.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name.replace(_MARK, " ").encode()


def _check_texts(tokenizer: Any, texts: TokenTexts, num_tokens: int) -> None:
    """Compares the bytes with the tokenizer's own text. Raises UserError if they differ."""
    stream = np.random.default_rng(0)
    whole = [token for token in range(num_tokens) if texts.pieces[token].isascii()]
    drawn = [stream.choice(whole, _LENGTH).tolist() for _ in range(_SAMPLES)] if whole else []
    for tokens in [tokenizer.encode(_TEXT, add_special_tokens=False), *drawn]:
        if texts.joined(tokens).decode(errors="replace") != continuation(
                tokenizer, tokens, clean_up_tokenization_spaces=False):
            raise UserError(f"dataset.stop: needs a tokenizer whose text is that of its tokens one after another; given "
                            f"{type(tokenizer).__name__} of another kind; allowed: [] with this model, or a byte-level or "
                            "SentencePiece tokenizer")
