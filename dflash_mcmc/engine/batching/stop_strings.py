"""Stop strings: a sequence ends at the first token at which its text contains one of them.

The text of a sequence is made of the bytes of its generated tokens (`token_texts.py`). An automaton over bytes (Aho & Corasick
1975, "Efficient string matching") knows after each token how much of a string the text ends with. Its steps are
stored for whole tokens: `table[state, classes[token]]` is the state after the token. Tokens with the same steps from every
state are one class, and most tokens are in the class that leads to nothing. One look-up is all that a token costs. The state
depends on the last bytes of the text alone, so it need not be kept with a trajectory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from dflash_mcmc.engine.batching.token_texts import TokenTexts

_NOTHING, _FOUND = 0, 1
_State = int


class StopStrings:
    """The strings that end a sequence, as a table over the tokens of a vocabulary.

    Attributes:
        strings: the strings.
        found: the state after a string was found.
        classes: int32 (vocabulary,), the class of each token.
        table: int32 (states, classes), the state after a token of a class.

    Args:
        strings: at least one, each not empty. A string that is the text of a special token ends a sequence at this token.
        texts: the bytes of the tokens.
    """

    found = _FOUND

    def __init__(self, strings: Sequence[str], texts: TokenTexts):
        self.strings, self._texts = tuple(strings), texts
        self._specials = [texts.specials[string] for string in strings if string in texts.specials]
        # A string that contains another one is never the first to be found.
        patterns = [string.encode() for string in strings
                    if not any(other in string for other in strings if other != string)]
        self._longest = max(map(len, patterns))
        self._steps = _steps(patterns)
        self._begin = _NOTHING if texts.first is None else len(self._steps)
        self.classes, self.table = self._compiled()

    def state(self, tokens: np.ndarray) -> _State:
        """The state after generated tokens, int64 (n,). Reads only the last of them."""
        pieces, first, held = self._texts.pieces, len(tokens), 0
        last = len(pieces[tokens[-1]]) if first else 0
        while first and held < self._longest + last:
            first -= 1
            held += len(pieces[tokens[first]])
        state = _NOTHING if first else self._begin
        for token in tokens[first:].tolist():
            state = int(self.table[state, self.classes[token]])
        return state

    def ends(self, tokens: np.ndarray) -> bool:
        """Whether the last of these generated tokens is the first at which their text contains a string."""
        return bool(len(tokens)) and self.state(tokens) == _FOUND

    def cut(self, text: str) -> str:
        """See `cut`."""
        return cut(text, self.strings)

    def _compiled(self) -> tuple[np.ndarray, np.ndarray]:
        """(classes, table). Tokens are divided further with each state from which some of them lead elsewhere."""
        pieces = self._texts.pieces
        usual = np.array([self._after(_NOTHING, piece) for piece in pieces], np.int32)
        usual[self._specials] = _FOUND
        changes = self._changes(usual)
        classes = np.unique(usual, return_inverse=True)[1]
        for tokens, after in changes.values():
            _, mine = np.unique(np.stack([classes[tokens], after]), axis=1, return_inverse=True)
            classes[tokens] = classes.max() + 1 + mine
        _, places, classes = np.unique(classes, return_index=True, return_inverse=True)
        table = np.tile(usual[places], (len(self._steps) + (self._begin != _NOTHING), 1))
        table[_FOUND] = _FOUND
        for state, (tokens, after) in changes.items():
            column = usual.copy()
            column[tokens] = after
            table[state] = column[places]
        return classes.astype(np.int32), table

    def _changes(self, usual: np.ndarray) -> dict[_State, tuple[np.ndarray, np.ndarray]]:
        """For each state, the tokens that lead elsewhere than from nothing, and the states that they lead to."""
        order = sorted(range(len(usual)), key=self._texts.pieces.__getitem__)
        tokens, pieces, changes = np.array(order), [self._texts.pieces[token] for token in order], {}
        for state in range(_FOUND + 1, len(self._steps)):
            column = usual.copy()
            for start, stop, after in self._elsewhere(pieces, state):
                column[tokens[start:stop]] = after
            changes[state] = self._changed(column, usual)
        if self._begin != _NOTHING:
            changes[self._begin] = self._changed(self._of_first_tokens(), usual)
        return changes

    def _changed(self, column: np.ndarray, usual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        column[self._specials] = _FOUND
        tokens = np.flatnonzero(column != usual)
        return tokens, column[tokens]

    def _of_first_tokens(self) -> np.ndarray:
        """The states after each token as the first of a text. A token without bytes leaves the text empty."""
        first = self._texts.first or ()
        return np.array([self._after(_NOTHING, first[token]) if piece else self._begin
                         for token, piece in enumerate(self._texts.pieces)], np.int32)

    def _after(self, state: _State, piece: bytes) -> _State:
        for byte in piece:
            state = self._steps[state][byte]
        return state

    def _elsewhere(self, pieces: Sequence[bytes], state: _State) -> Iterator[tuple[int, int, _State]]:
        """Ranges of the sorted pieces that lead from `state` to another state than from nothing, with this state.

        It follows the common beginnings of pieces only as far as the two states differ.
        """
        waiting = [(0, len(pieces), b"", state, _NOTHING)]
        while waiting:
            start, stop, begin, here, there = waiting.pop()
            if here == _FOUND:
                yield start, stop, _FOUND
                continue
            longer = bisect.bisect_right(pieces, begin, start, stop)
            if longer > start:
                yield start, longer, here
            for byte, (one, other) in enumerate(zip(self._steps[here], self._steps[there], strict=True)):
                if one == other:
                    continue
                piece = begin + bytes([byte])
                low = bisect.bisect_left(pieces, piece, longer, stop)
                high = bisect.bisect_left(pieces, begin + bytes([byte + 1]), low, stop) if byte < 255 else stop
                if high > low:
                    waiting.append((low, high, piece, one, other))


def cut(text: str, strings: Sequence[str]) -> str:
    """A text up to the first place at which one of the strings begins."""
    places = [place for string in strings if (place := text.find(string)) >= 0]
    return text[:min(places)] if places else text


def _steps(patterns: Sequence[bytes]) -> list[list[_State]]:
    """The state after each byte, [states][256]. State 0 is no beginning of a pattern; state 1, a found one, is never left."""
    children: list[dict[int, int]] = [{}, {}]
    whole = set[int]()
    for pattern in patterns:
        node = _NOTHING
        for byte in pattern:
            if byte not in children[node]:
                children.append({})
                children[node][byte] = len(children) - 1
            node = children[node][byte]
        whole.add(node)
    steps = [[_NOTHING] * 256 for _ in children]
    steps[_FOUND] = [_FOUND] * 256
    shorter = [_NOTHING] * len(children)  # the longest proper ending of a node's text that is a beginning of a pattern
    level = [_NOTHING]
    while level:
        node = level.pop(0)
        if node != _NOTHING:
            steps[node] = list(steps[shorter[node]])
        for byte, child in children[node].items():
            shorter[child] = steps[shorter[node]][byte] if node != _NOTHING else _NOTHING
            if child in whole:
                steps[node][byte] = _FOUND
            else:
                steps[node][byte] = child
                level.append(child)
    return steps
