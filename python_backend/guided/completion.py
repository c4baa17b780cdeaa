"""A short way from where an answer stands to the end of its structure, found by trying tokens on copies of its matcher.

Every way found is a sound one, for its tokens were accepted one by one; that no shorter one exists is not claimed.
Knows nothing of requests.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from python_backend.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_VALUES = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "null", "true", "[]", "{}", "[", "{", "-")
_MAX_SINGLE = 96
_FORKS_TO_IMPROVE = 256  # for a completion shorter than the one that was found
_MAX_VISITS = 2  # to places equally far where the same may follow: most likely the same place
_MAX_SPLICES = 6
_MANY = 16  # options from here on are compared by where they lead
_FREE = 8  # where more than this share of the vocabulary is allowed, the text is inside a string


class Searchable(Protocol):
    """What the search needs of a mask."""

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        """Write the allowed tokens, one bit each, into int32 [ceil(vocab / 32)]."""

    def accept(self, token_id: int) -> None:
        """Take a token; a RequestError says that it is not allowed."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next."""

    def fork(self) -> Searchable:
        """An independent twin."""

    @property
    def is_accepting(self) -> bool:
        """Whether the structure is complete."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """What one search may cost."""

    max_forks: int = 2048
    seconds: float = 1.0
    first: bool = False  # whether the first completion is good enough


class TokenOrder:
    """Which tokens of a vocabulary to try first: those that close, then short values, then the longest and others.

    Args:
        texts: of every token id; "" for those that are no text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        known = [token_id for token_id, text in enumerate(texts) if text and not text.isspace()]
        spaces = [token_id for token_id, text in enumerate(texts) if len(text) == 1 and text.isspace()]

        def by_closing(first: str, others: str) -> NDArray[np.int64]:
            found = [i for i in known if texts[i][0] in first and set(texts[i]) <= set(others)]
            return _array(sorted(found, key=lambda i: (-sum(c in "}])>" for c in texts[i]), len(texts[i]))))

        self._quotes = by_closing('"', '"}]')
        self._brackets = by_closing("}])>", '"}])>')
        self._next = by_closing(",:", ',: "')
        places = {text: place for place, text in enumerate(_VALUES)}
        self._values = _array(sorted((i for i in known if texts[i] in places), key=lambda i: places[texts[i]]))
        single = [*(i for i in known if len(texts[i]) == 1), *spaces]
        kinds = {
            i: (not texts[i].isascii(), texts[i].isspace(), texts[i].isalnum(), texts[i].isdigit(), i) for i in single
        }
        self._single = _array(sorted(single, key=kinds.__getitem__))
        self._longest = _array(sorted(known, key=lambda i: -len(texts[i])))

    def candidates(self, bitmask: NDArray[np.int32]) -> list[int]:
        """A few of the allowed tokens, the most promising first."""
        allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        inside_string = int(allowed.sum()) * _FREE > len(allowed)
        plan = [(self._quotes, 3), (self._longest, 1), (self._single, 2)]
        if not inside_string:
            plan = [(self._brackets, 2), (self._quotes, 2), (self._next, 1)]
            plan += [(self._values, 3), (self._longest, 2), (self._single, 3)]
        found: list[int] = []
        for order, count in plan:
            found += order[np.flatnonzero(allowed[order])[:count]].tolist()
        return list(dict.fromkeys(found))

    def single_characters(self, bitmask: NDArray[np.int32]) -> list[int]:
        """Allowed tokens of one character, punctuation first."""
        allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        found: list[int] = self._single[np.flatnonzero(allowed[self._single])[:_MAX_SINGLE]].tolist()
        return found


@dataclass(frozen=True, slots=True, order=True)
class _Way:
    """Tokens from the beginning of a search to one of the places it has reached; the most promising way sorts first.

    `doubt` grows with every token that was not the first candidate, and where a place looks like one before it; it
    falls with every step, so that a way that gets on is followed rather than another one from further back.
    """

    doubt: int
    serial: int
    tokens: tuple[int, ...] = field(compare=False)
    masks: tuple[bytes, ...] = field(compare=False)  # of the places on the way
    matcher: Searchable = field(compare=False)


def shortest_completion(
    matcher: Searchable,
    limit: int,
    order: TokenOrder,
    *,
    vocab_size: int,
    end_ids: Sequence[int],
    limits: SearchLimits,
    known: Sequence[int] = (),
) -> list[int] | None:
    """Tokens, `limit` at most, that complete the structure; empty where it is complete; None where none were found.

    The most promising way is followed to its end first, then those that differ from it ever more.

    Args:
        matcher: left as it is.
        limit: tokens.
        order: of the vocabulary.
        vocab_size: width of the logits.
        end_ids: tokens that end the answer, and so lead nowhere.
        limits: of the search.
        known: a completion from near here; its end may do here as well.
    """
    deadline = time.perf_counter() + limits.seconds
    bitmask = np.zeros(-(-vocab_size // 32), np.int32)
    ways = [_Way(0, 0, (), (), matcher)]
    best: list[int] | None = None
    visits: Counter[tuple[bytes, int]] = Counter()
    serial, max_forks = 0, limits.max_forks
    while ways and serial < max_forks and time.perf_counter() < deadline:
        way = heapq.heappop(ways)
        if len(way.tokens) > limit:
            continue
        end = spliced(way.matcher, known, limit - len(way.tokens))
        if end is not None:
            best = [*way.tokens, *end]
            limit, max_forks = len(best) - 1, min(max_forks, serial + _FORKS_TO_IMPROVE)
            if limits.first or limit < 0:
                break
            continue
        for next_way in _continued(way, order, bitmask, end_ids, visits):
            serial += 1
            if len(next_way.tokens) <= limit:
                heapq.heappush(ways, replace(next_way, serial=serial))
    return best


def _continued(
    way: _Way,
    order: TokenOrder,
    bitmask: NDArray[np.int32],
    end_ids: Sequence[int],
    visits: Counter[tuple[bytes, int]],
) -> Iterator[_Way]:
    """The ways that lead on from the end of this one."""
    doubt, masks = way.doubt - 1, way.masks
    try:
        forced = way.matcher.forced_tokens()
        if forced and not any(token_id in end_ids for token_id in forced):
            options = [forced]
        else:
            way.matcher.fill(bitmask)
            mask = bitmask.tobytes()
            visits[mask, len(way.tokens)] += 1
            if visits[mask, len(way.tokens)] > _MAX_VISITS:
                return
            again = masks.count(mask)
            tokens = order.single_characters(bitmask) if again == 1 else order.candidates(bitmask)
            doubt, masks = doubt + min(again, 3), (*masks, mask)
            options = [[token_id] for token_id in tokens]
    except RequestError:  # too complex to go on here
        return
    rank = 0
    seen: set[bytes] = set()
    for tokens in options:
        twin = advanced(way.matcher, tokens)
        if twin is None or (len(options) > _MANY and not _leads_elsewhere(twin, bitmask, seen)):
            continue
        yield _Way(doubt + 2 * min(rank, 3), 0, (*way.tokens, *tokens), masks, twin)
        rank += 1


def _leads_elsewhere(matcher: Searchable, bitmask: NDArray[np.int32], seen: set[bytes]) -> bool:
    """Whether what may follow here is not what may follow in one of the places seen."""
    try:
        matcher.fill(bitmask)
    except RequestError:
        return False
    mask = bitmask.tobytes()
    known = mask in seen
    seen.add(mask)
    return not known


def spliced(matcher: Searchable, known: Sequence[int], limit: int) -> list[int] | None:
    """A completion of at most `limit` tokens that is one from elsewhere without its first few; None where none fits."""
    if matcher.is_accepting:
        return []
    for start in range(max(0, len(known) - limit), min(len(known), _MAX_SPLICES)):
        twin = advanced(matcher, known[start:])
        if twin is not None and twin.is_accepting:
            return list(known[start:])
    return None


def advanced(matcher: Searchable, tokens: Sequence[int]) -> Searchable | None:
    """A twin that has taken the tokens; None where it does not allow them."""
    twin = matcher.fork()
    try:
        for token_id in tokens:
            twin.accept(token_id)
    except RequestError:
        return None
    return twin


def _array(ids: list[int]) -> NDArray[np.int64]:
    return np.array(ids, np.int64)
