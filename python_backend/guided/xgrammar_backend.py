"""Constraint backend on XGrammar, as TensorRT-LLM has it on a GPU; an optional extra.

Guides become EBNF in its dialect. Knows nothing of engines.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.errors import BuildError, EngineFailure, InvalidRequest, LimitExceeded, Unsupported
from python_backend.guided.backend import Grammar
from python_backend.guided.bitmask import set_bits
from python_backend.guided.ecma_patterns import EBNF, PatternProblem, rewritten
from python_backend.guided.guide import utf8
from python_backend.guided.keywords import audit
from python_backend.guided.limits import GuideLimits
from python_backend.guided.xgrammar_ebnf import as_ebnf, choices_ebnf, without_halves
from python_backend.guided.xgrammar_library import load_library
from python_backend.guided.xgrammar_schema import rewrite
from python_backend.guided.xgrammar_support import SUPPORT

if TYPE_CHECKING:
    from collections.abc import Collection

    from python_backend.guided.guide import CheckedGuide

# Where in its source a check failed, which says nothing to a client.
_PLACE = re.compile(r"^\[[0-9:]+\] \S+: |^Check failed: .*? is false: ", re.MULTILINE)


class XGrammarBackend:
    """Translates guides, and with a tokenizer compiles them."""

    name = "xgrammar"
    support = SUPPORT

    def __init__(self, limits: GuideLimits | None = None, special_tokens: Collection[str] = ()) -> None:
        """`special_tokens` are texts of tokens, which no answer holds.

        Raises:
            BuildError: XGrammar is not installed.
        """
        self._limits = limits or GuideLimits()
        self._special_tokens = frozenset(special_tokens)
        self._library = load_library()
        self.version: str = self._library.version
        self._compiler: Any = None
        self._end_ids: tuple[int, ...] = ()
        self._num_words = 0

    def load_tokenizer(self, tokenizer_json: str, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        """Make ready to compile; as the protocol has it."""
        self._end_ids = end_ids or (vocab_size - 1,)
        self._num_words = -(-vocab_size // 32)
        try:
            described = json.loads(str(self._library.tokenizer_info._detect_metadata_from_hf(tokenizer_json)))
            tokens = _encoded_vocabulary(json.loads(tokenizer_json), vocab_size, self._special_tokens)
            info = self._library.tokenizer_info(
                tokens, described["vocab_type"], vocab_size, list(self._end_ids), described["add_prefix_space"]
            )
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise BuildError(f"XGrammar cannot use the tokenizer: {error}") from error
        # One thread, no cache of its own, no limit of that cache, masks made ahead.
        self._compiler = self._library.compiler(info, 1, False, -1, False)

    def grammar(self, guide: CheckedGuide) -> Grammar:
        """Translate a guide.

        Raises:
            Unsupported: a keyword, a format or a part of an expression is not enforced.
            InvalidRequest: the schema or the expression has an error.
            LimitExceeded: a string in it is too long.
        """
        if guide.kind == "regex":
            try:
                return _grammar(ebnf=f"root ::= {rewritten(guide.expression, EBNF)}")
            except PatternProblem as problem:
                raise Unsupported(f"The regular expression cannot be enforced: it has {problem}.") from None
        if guide.kind == "ebnf_grammar":
            return _grammar(ebnf=without_halves(utf8(guide.expression)))
        if guide.kind == "choice":
            return _grammar(ebnf=choices_ebnf(guide.choices))
        if guide.kind == "structural_tag":
            return self._tag_grammar(guide)
        text, warnings = self._schema_ebnf(guide, guide.schema)
        return _grammar(warnings, ebnf=text)

    def compile(self, grammar: Grammar) -> XGrammarGuide:
        """Compile and compute the first mask.

        Raises:
            InvalidRequest: the backend finds it malformed, or nothing satisfies it.
            LimitExceeded: it is nested too deep.
        """
        if self._compiler is None:
            raise RuntimeError("load_tokenizer has not been called")
        ((kind, text),) = json.loads(grammar.text).items()
        try:
            if kind == "ebnf":
                compiled = self._compiler.compile_grammar_from_strings(text, "root")
            else:
                compiled = self._compiler.compile_structural_tag(json.dumps(text))
        except (RuntimeError, ValueError) as error:
            raise _refusal(str(error)) from None
        guide = XGrammarGuide(self._library.matcher, compiled, self._end_ids, self._num_words)
        if not guide.start(self._end_ids).allows_anything:
            raise InvalidRequest("No text can satisfy the structure.")
        return guide

    def _schema_ebnf(self, guide: CheckedGuide, schema: Any) -> tuple[str, list[str]]:
        found = audit(schema, SUPPORT, strict=guide.strict, max_literal_chars=self._limits.max_literal_chars)
        rewritten, warnings = rewrite(found.schema, strict=guide.strict)
        try:
            text = as_ebnf(self._library.grammar, rewritten, guide.whitespace)
        except (RuntimeError, ValueError) as error:
            raise _refusal(str(error)) from None
        return text, [*found.warnings, *warnings]

    def _tag_grammar(self, guide: CheckedGuide) -> Grammar:
        tags, warnings = [], []
        for tag in guide.tags:
            if tag.trigger in self._special_tokens:
                raise Unsupported(f"The trigger {tag.trigger!r} is a special token; XGrammar watches for text only.")
            text, told = self._schema_ebnf(guide, tag.schema)
            warnings += told
            tags.append({"begin": tag.begin, "content": {"type": "grammar", "grammar": text}, "end": tag.end})
        triggers = list(dict.fromkeys(tag.trigger for tag in guide.tags))
        form: dict[str, Any] = {"tags": tags, "stop_after_first": guide.stop_after_first}
        if guide.separator is None:
            form |= {"type": "triggered_tags", "triggers": triggers}
        else:
            form |= {"type": "tags_with_separator", "separator": guide.separator, "at_least_one": True}
        return _grammar(warnings, structural_tag={"type": "structural_tag", "format": form})


class XGrammarGuide:
    """A compiled guide, shared by the matchers of all answers."""

    def __init__(self, matcher: Any, compiled: Any, tokenizer_end_ids: tuple[int, ...], num_words: int) -> None:
        self._matcher, self._compiled = matcher, compiled
        self._tokenizer_end_ids, self._num_words = tokenizer_end_ids, num_words

    def start(self, end_ids: tuple[int, ...]) -> XGrammarMatcher:
        """A matcher at the beginning."""
        matcher = self._matcher(self._compiled, list(self._tokenizer_end_ids), False, -1, None)
        return XGrammarMatcher(matcher, self._tokenizer_end_ids, end_ids, self._num_words)


class XGrammarMatcher:
    """One answer. Tokens that may end it are the request's, whatever the tokenizer says."""

    __slots__ = ("_end_ids", "_finished", "_fix_ends", "_matcher", "_num_words", "_tokenizer_end_ids")

    def __init__(
        self, matcher: Any, tokenizer_end_ids: tuple[int, ...], end_ids: tuple[int, ...], num_words: int
    ) -> None:
        self._matcher, self._num_words = matcher, num_words
        self._tokenizer_end_ids, self._end_ids = tokenizer_end_ids, end_ids
        self._fix_ends = set(tokenizer_end_ids) != set(end_ids)
        self._finished: bool | None = None  # None: not looked at since the last token

    def fill(self, bitmask: np.ndarray) -> None:
        """Write the allowed tokens into a contiguous int32 [ceil(vocab / 32)].

        Raises:
            EngineFailure: the structure has become too complex to go on.
        """
        try:
            self._matcher.fill_next_token_bitmask(bitmask, 0, False)
        except RuntimeError as error:
            raise EngineFailure(f"The structure asked for became too complex here: {_plain(str(error))}.") from None
        if self._fix_ends:
            set_bits(bitmask, self._tokenizer_end_ids, False)
            set_bits(bitmask, self._end_ids, self.is_accepting)

    def accept(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            EngineFailure: the structure does not allow it here.
        """
        if not self._matcher.accept_token(token_id, False):
            raise EngineFailure(f"Token {token_id} breaks the structure asked for.")
        self._finished = None

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back.

        Raises:
            EngineFailure: there are not that many.
        """
        try:
            self._matcher.rollback(num_tokens)
        except RuntimeError:
            raise EngineFailure(f"The structure cannot go back by {num_tokens} tokens.") from None
        self._finished = None

    def fork(self) -> XGrammarMatcher:
        """An independent twin in the same state."""
        return XGrammarMatcher(self._matcher.fork(), self._tokenizer_end_ids, self._end_ids, self._num_words)

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, the longest first; empty where there is a choice, or the structure may end."""
        return list(self._matcher.find_jump_forward_tokens())

    @property
    def is_accepting(self) -> bool:
        """Whether the answer so far satisfies the structure."""
        return bool(self._matcher.is_completed())

    @property
    def finished(self) -> bool:
        """Whether it does, and nothing can follow."""
        if self._finished is None:
            self._finished = self.is_accepting and not self._goes_on()
        return self._finished

    @property
    def allows_anything(self) -> bool:
        """Whether a token may come next, or the answer may end here."""
        return self.is_accepting or self._goes_on()

    def _goes_on(self) -> bool:
        bitmask = np.zeros(self._num_words, np.int32)
        self._matcher.fill_next_token_bitmask(bitmask, 0, False)
        set_bits(bitmask, self._tokenizer_end_ids, False)
        return bool(bitmask.any())


def _encoded_vocabulary(layout: dict[str, Any], vocab_size: int, special_tokens: Collection[str]) -> list[str]:
    """Tokens by id; what is no text, or is not written as the rest is, is empty and never allowed."""
    vocabulary = layout["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    tokens = [""] * vocab_size
    for token, index in vocabulary.items():
        tokens[index] = token
    for added in layout.get("added_tokens", []):
        text = added["content"]
        plain = text.isascii() and text.isprintable() and " " not in text
        tokens[added["id"]] = text if plain and not added["special"] and text not in special_tokens else ""
    return tokens


def _grammar(warnings: Collection[str] = (), **content: Any) -> Grammar:
    return Grammar(json.dumps(content, ensure_ascii=False), tuple(warnings))


def _refusal(message: str) -> Exception:
    """XGrammar's message as an error of ours."""
    plain = _plain(message)
    if "recursion" in plain.lower() or "too large" in plain:
        return LimitExceeded(f"The structure is too complex: {plain}. Simplify it, or split it over several requests.")
    if "cannot accept any" in plain or "nsatisfiable" in plain:
        return InvalidRequest(f"No text can satisfy the structure: {plain}.")
    return InvalidRequest(f"The structure is malformed: {plain}.")


def _plain(message: str) -> str:
    lines = [line for line in _PLACE.sub("", _PLACE.sub("", message)).splitlines() if line.strip()]
    return lines[0].strip()[:300].rstrip(".") if lines else "no reason given"
