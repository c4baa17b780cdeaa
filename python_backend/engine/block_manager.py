"""Paged KV memory: which block holds which tokens, who uses it, and what can be used again.

Owns block tables and reference counts. A full block is known by its tokens and all tokens before it; blocks nobody
uses keep their content until the memory is needed, oldest first. Knows nothing of tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.engine.prompt_reader import reads_prompt

if TYPE_CHECKING:
    from python_backend.engine.sequence import Sequence

# How many continuations of a prefix are looked at for a partly equal block.
MAX_PARTIAL_CANDIDATES = 16


@dataclass(slots=True)
class _Content:
    """The tokens of one cached block. `parent` is the uid of the content before it; the pair is the key."""

    uid: int
    parent: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class BlockCopy:
    """One block to be copied before the next step."""

    source: int
    target: int


class BlockManager:
    """Allocates, shares, forks and frees KV blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_reuse: bool = True) -> None:
        self.num_blocks, self.block_size, self._enable_reuse = num_blocks, block_size, enable_reuse
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_count = [0] * num_blocks
        self._content: list[_Content | None] = [None] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks nobody uses, least recently used first
        self._by_key: dict[tuple[int, tuple[int, ...]], int] = {}
        self._children: dict[int, dict[int, None]] = {}  # uid of a content -> blocks that continue it
        self._roots: dict[int, int] = {}  # cache salt -> uid
        self._chains: dict[Sequence, list[int]] = {}  # uids of the sequence's registered blocks
        self._next_uid = 0
        self.blocks_reused = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be had: empty ones and cached ones nobody uses."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: Sequence) -> list[BlockCopy]:
        """Give a sequence without blocks those that already hold the start of its tokens.

        The last token is never taken from the cache, since its logits are needed. A block that is only partly
        equal is copied, if there is room. Sets num_computed_tokens and num_cached_tokens.
        """
        assert not sequence.block_table
        parent = self._root(sequence.request.cache_salt)
        chain = self._chains[sequence] = [parent]
        if not self._enable_reuse or reads_prompt(sequence):
            return []
        limit = len(sequence.token_ids) - 1
        done = 0
        while done + self.block_size <= limit:
            tokens = tuple(sequence.token_ids[done : done + self.block_size])
            block = self._by_key.get((chain[-1], tokens))
            if block is None:
                break
            self._take(block)
            sequence.block_table.append(block)
            chain.append(self._uid(block))
            done += self.block_size
        copies, partial = self._match_partial(sequence, done, limit)
        self.blocks_reused += len(sequence.block_table)
        sequence.num_computed_tokens = sequence.num_cached_tokens = done + partial
        return copies

    def _match_partial(self, sequence: Sequence, done: int, limit: int) -> tuple[list[BlockCopy], int]:
        wanted = sequence.token_ids[done : min(done + self.block_size, limit)]
        best, length = -1, 0
        for block in list(self._children.get(self._chains[sequence][-1], ()))[:MAX_PARTIAL_CANDIDATES]:
            content = self._content[block]
            assert content is not None
            common = _common_prefix(wanted, content.tokens)
            if common > length:
                best, length = block, common
        if best < 0 or not self.num_free:
            return [], 0
        self._take(best)  # keeps it from being evicted for its own copy
        try:
            if not self.num_free:
                return [], 0
            target = self._pop_free()
        finally:
            self._release(best)
        sequence.block_table.append(target)
        return [BlockCopy(best, target)], length

    def needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that must be free before `num_tokens` more tokens of the sequence can be computed."""
        total = self.blocks_for(sequence.num_computed_tokens + num_tokens)
        shared = self._shared_tail(sequence)
        return max(0, total - len(sequence.block_table)) + int(shared)

    def allocate(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
        """Make room for `num_tokens` more tokens; `needed` blocks must be free.

        A shared block that would be written is copied first.
        """
        copies = []
        if self._shared_tail(sequence):
            index = sequence.num_computed_tokens // self.block_size
            old, new = sequence.block_table[index], self._pop_free()
            self._release(old)
            sequence.block_table[index] = new
            copies.append(BlockCopy(old, new))
        total = self.blocks_for(sequence.num_computed_tokens + num_tokens)
        while len(sequence.block_table) < total:
            sequence.block_table.append(self._pop_free())
        return copies

    def commit(self, sequence: Sequence) -> None:
        """Register the blocks that the last step filled, so that others can use them."""
        if not self._enable_reuse:
            return
        chain = self._chains[sequence]
        while len(chain) * self.block_size <= sequence.num_computed_tokens:
            index = len(chain) - 1
            tokens = tuple(sequence.token_ids[index * self.block_size : len(chain) * self.block_size])
            chain.append(self._register(sequence.block_table[index], chain[-1], tokens))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`."""
        child.block_table = list(parent.block_table)
        self._chains[child] = list(self._chains[parent])
        for block in child.block_table:
            self._take(block)

    def free(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back; what they hold stays usable until the memory is needed."""
        chain = self._chains.pop(sequence, None)
        if chain and self._enable_reuse:
            done = (len(chain) - 1) * self.block_size
            rest = tuple(sequence.token_ids[done : sequence.num_computed_tokens])
            if rest and self._ref_count[sequence.block_table[len(chain) - 1]] == 1:
                self._register(sequence.block_table[len(chain) - 1], chain[-1], rest)
        for block in reversed(sequence.block_table):  # ends before starts: a prefix outlives what follows it
            self._release(block)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def check_integrity(self) -> None:
        """Assert every invariant; for tests and idle moments."""
        held = [0] * self.num_blocks
        for sequence in self._chains:
            for block in sequence.block_table:
                held[block] += 1
        assert held == self._ref_count
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free)
        assert not free & idle
        for block in range(self.num_blocks):
            in_use = self._ref_count[block] > 0
            assert in_use != (block in free or block in idle), block
            assert (block in idle) <= (self._content[block] is not None)
            assert self._content[block] is None or block not in free
        for (parent, tokens), block in self._by_key.items():
            content = self._content[block]
            assert content is not None
            assert (content.parent, content.tokens) == (parent, tokens)
            assert block in self._children[parent]
        assert sum(map(len, self._children.values())) == len(self._by_key) == sum(c is not None for c in self._content)

    def _root(self, salt: int) -> int:
        if salt not in self._roots:
            self._roots[salt] = self._new_uid()
        return self._roots[salt]

    def _new_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid

    def _uid(self, block: int) -> int:
        content = self._content[block]
        assert content is not None
        return content.uid

    def _register(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        known = self._by_key.get((parent, tokens))
        if known is not None:  # computed twice at the same time: later blocks chain to the first
            return self._uid(known)
        if self._content[block] is not None:
            self._forget(block)
        content = self._content[block] = _Content(self._new_uid(), parent, tokens)
        self._by_key[parent, tokens] = block
        self._children.setdefault(parent, {})[block] = None
        return content.uid

    def _forget(self, block: int) -> None:
        content = self._content[block]
        assert content is not None
        del self._by_key[content.parent, content.tokens]
        siblings = self._children[content.parent]
        del siblings[block]
        if not siblings:
            del self._children[content.parent]
        self._content[block] = None

    def _shared_tail(self, sequence: Sequence) -> bool:
        index = sequence.num_computed_tokens // self.block_size
        return index < len(sequence.block_table) and self._ref_count[sequence.block_table[index]] > 1

    def _take(self, block: int) -> None:
        if self._ref_count[block] == 0:
            del self._idle[block]
        self._ref_count[block] += 1

    def _release(self, block: int) -> None:
        self._ref_count[block] -= 1
        if self._ref_count[block]:
            return
        if self._content[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def _pop_free(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._ref_count[block] = 1
        return block


def _common_prefix(a: list[int], b: tuple[int, ...]) -> int:
    length = 0
    for x, y in zip(a, b):  # noqa: B905 - the shorter one decides
        if x != y:
            break
        length += 1
    return length
