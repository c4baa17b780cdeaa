"""Stop strings, found in the text of one sequence as it grows, wherever token borders fall.

The first place where any stop string is complete ends the text; among strings complete there, the longest counts.
Knows nothing of the engine, whose TextStop protocol `StopText` satisfies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.text.detokenize import Detokenizer
from python_backend.text.words import clean_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from python_backend.text.tokenizer import Tokenizer


class StopText:
    """Watches one sequence.

    With `exclude` the stop string itself is cut too, and tokens that may belong to one are held back.
    """

    __slots__ = ("_detokenizer", "_exclude", "_lengths", "_matchers")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_texts: str | Iterable[str],
        exclude: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        words = clean_words(stop_texts, "stop_words")
        self._matchers = [_Matcher(word) for word in sorted(words, key=len, reverse=True)]
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._exclude = exclude
        self._lengths: list[int] = []  # characters that each of the last tokens added, newest last

    def push(self, token_id: int) -> int | None:
        """Take one generated token. A caller that is not to stop yet goes on pushing.

        Returns:
            None while no stop string is complete; else how many characters of the text so far, decoded as a whole,
            lie behind the place where the text has to end.
        """
        delta = self._detokenizer.push([token_id])
        cut = None
        for index, char in enumerate(delta):
            matched = self._advance(char)
            if matched is not None and cut is None:
                cut = len(delta) - index - 1 + self._detokenizer.held + (len(matched) if self._exclude else 0)
        if self._exclude:
            self._lengths.append(len(delta))
            del self._lengths[: -max(1, self.held_tokens())]
        return cut

    def held_tokens(self) -> int:
        """How many of the last tokens must not be shown yet, since they may belong to a stop string."""
        if not self._exclude:
            return 0
        open_characters = max((matcher.state for matcher in self._matchers), default=0)
        count = 0
        for length in reversed(self._lengths):
            if open_characters <= 0:
                break
            open_characters -= length
            count += 1
        return count

    def _advance(self, char: str) -> str | None:
        """Feed every matcher; the longest word that is complete now."""
        matched = None
        for matcher in self._matchers:
            if matcher.advance(char) and matched is None:
                matched = matcher.word
        return matched


class _Matcher:
    """Knuth-Morris-Pratt: `state` is the length of the longest prefix of the word that the text ends with."""

    __slots__ = ("_fallback", "state", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.state = 0
        self._fallback = [0] * len(word)
        length = 0
        for index in range(1, len(word)):
            while length and word[index] != word[length]:
                length = self._fallback[length - 1]
            if word[index] == word[length]:
                length += 1
            self._fallback[index] = length

    def advance(self, char: str) -> bool:
        """Take one character of the text; True when the word is complete with it."""
        word, state = self.word, self.state
        while state and word[state] != char:
            state = self._fallback[state - 1]
        if word[state] == char:
            state += 1
        if state == len(word):
            self.state = self._fallback[state - 1]
            return True
        self.state = state
        return False
