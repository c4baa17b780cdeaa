"""Constraint backend on llguidance: grammars in its language, masks in numpy memory.

Needs the tokenizer.json text only; neither torch nor transformers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from python_backend.errors import BuildError, EngineFailure, InvalidRequest, LimitExceeded, Unsupported
from python_backend.guided.backend import Grammar
from python_backend.guided.guide import utf8
from python_backend.guided.keywords import audit
from python_backend.guided.limits import GuideLimits
from python_backend.guided.llguidance_support import SUPPORT
from python_backend.guided.llguidance_tags import tag_lark

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np

    from python_backend.guided.guide import CheckedGuide, Whitespace

_WHITESPACE: dict[Whitespace, dict[str, Any]] = {
    "single": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "free": {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"},
}
# Words by which llguidance says that a limit of ours stopped it.
_LIMIT_WORDS = ("too big", "too large", "too many", "too complex", "max is", "limit", "too deeply", "fuel")
_REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$/&~-#")


class LLGuidanceBackend:
    """Translates guides, and with a tokenizer compiles them."""

    name = "llguidance"
    version: str = llguidance.__version__
    support = SUPPORT

    def __init__(self, limits: GuideLimits | None = None, special_tokens: Collection[str] = ()) -> None:
        """`special_tokens` are texts of tokens that a structural tag's trigger may be."""
        self._limits = limits or GuideLimits()
        self._special_tokens = frozenset(special_tokens)
        self._special_ids: dict[str, int] = {}
        self._tokenizer: Any = None
        self._tokenizer_end_ids: tuple[int, ...] = ()
        self._parser_limits = llguidance.LLParserLimits(
            max_lexer_states=self._limits.max_lexer_states, verbose_errors=False
        )

    def load_tokenizer(self, tokenizer_json: str, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        """Make ready to compile; as the protocol has it."""
        self._tokenizer_end_ids = end_ids or (vocab_size - 1,)
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(self._tokenizer_end_ids), slices=_slices()
            )
        except Exception as error:  # the library raises whatever fits
            raise BuildError(f"llguidance cannot use the tokenizer: {error}") from error
        tokenized = {text: self._tokenizer.tokenize_str(text) for text in self._special_tokens}
        self._special_ids = {text: ids[0] for text, ids in tokenized.items() if len(ids) == 1}

    def grammar(self, guide: CheckedGuide) -> Grammar:
        """Translate a guide.

        Raises:
            Unsupported: a keyword or format is not enforced.
            InvalidRequest: the EBNF has an error.
            LimitExceeded: a string in it is too long.
        """
        if guide.kind == "regex":
            # As in JSON Schema, and in XGrammar on a GPU: \d and \w are ASCII.
            pattern = llguidance.regex_to_lark(utf8(guide.expression), "dw")
            return Grammar(llguidance.LLMatcher.grammar_from_lark(f"start: /{pattern}/"))
        if guide.kind == "ebnf_grammar":
            return Grammar(llguidance.LLMatcher.grammar_from_lark(_from_ebnf(utf8(guide.expression))))
        if guide.kind == "choice":
            pattern = "|".join(map(_escaped, guide.choices))
            return Grammar(llguidance.LLMatcher.grammar_from_regex(f"({pattern})"))
        if guide.kind == "structural_tag":
            return self._tag_grammar(guide)
        return self._schema_grammar(guide)

    def compile(self, grammar: Grammar) -> LLGuidanceGuide:
        """Compile and compute the first mask.

        Raises:
            InvalidRequest: the backend finds it malformed, or nothing satisfies it.
            Unsupported: the backend cannot enforce something in it.
            LimitExceeded: it is too complex.
        """
        if self._tokenizer is None:
            raise RuntimeError("load_tokenizer has not been called")
        matcher = llguidance.LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=self._parser_limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return LLGuidanceGuide(matcher, self._tokenizer_end_ids)

    def _schema_grammar(self, guide: CheckedGuide) -> Grammar:
        found = self._audited(guide, guide.schema)
        text = _schema_text(found.schema, guide.whitespace)
        problem = _one_of_problem(text)
        if problem and not guide.strict:
            text = _schema_text(found.schema, guide.whitespace, coerce_one_of=True)
            found.warnings.append("oneOf is enforced as anyOf: its branches cannot be told apart in advance.")
        elif problem:
            raise Unsupported(
                "The keyword oneOf cannot be enforced: its branches cannot be told apart in advance. Use anyOf, give "
                "each branch a property with another const, or send guided_decoding_strict=false to treat it as anyOf."
            )
        return Grammar(text, tuple(found.warnings))

    def _tag_grammar(self, guide: CheckedGuide) -> Grammar:
        found = [self._audited(guide, tag.schema) for tag in guide.tags]
        schemas = [{**schema.schema, "x-guidance": _options(guide.whitespace)} for schema in found]
        text = tag_lark(guide, schemas, self._special_ids)
        warnings = [warning for schema in found for warning in schema.warnings]
        return Grammar(llguidance.LLMatcher.grammar_from_lark(text), tuple(warnings))

    def _audited(self, guide: CheckedGuide, schema: Any) -> Any:
        return audit(schema, SUPPORT, strict=guide.strict, max_literal_chars=self._limits.max_literal_chars)


class LLGuidanceGuide:
    """A compiled guide; every answer gets a copy of its first state, which shares the lexer."""

    def __init__(self, matcher: Any, tokenizer_end_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._tokenizer_end_ids = tokenizer_end_ids

    def start(self, end_ids: tuple[int, ...]) -> LLGuidanceMatcher:
        """A matcher at the beginning."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._tokenizer_end_ids, end_ids)


class LLGuidanceMatcher:
    """One answer. Tokens that may end it are the request's, whatever the tokenizer says."""

    __slots__ = ("_end_ids", "_fix_ends", "_matcher", "_tokenizer_end_ids")

    def __init__(self, matcher: Any, tokenizer_end_ids: tuple[int, ...], end_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._tokenizer_end_ids, self._end_ids = tokenizer_end_ids, end_ids
        self._fix_ends = set(tokenizer_end_ids) != set(end_ids)

    def fill(self, bitmask: np.ndarray) -> None:
        """Write the allowed tokens into a contiguous int32 [ceil(vocab / 32)].

        Raises:
            EngineFailure: the structure has become too complex to go on.
        """
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        if self._matcher.is_error():
            raise EngineFailure(
                f"The structure asked for became too complex here: {_first_line(self._matcher.get_error())}. "
                "Simplify it, with shorter strings and fewer optional properties."
            )
        if self._fix_ends:
            for token_id in self._tokenizer_end_ids:
                _set_bit(bitmask, token_id, False)
            accepting = self._matcher.is_accepting()
            for token_id in self._end_ids:
                _set_bit(bitmask, token_id, accepting)

    def accept(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            EngineFailure: the structure does not allow it here.
        """
        if not self._matcher.consume_token(token_id):
            raise EngineFailure(
                f"Token {token_id} breaks the structure asked for: {_first_line(self._matcher.get_error())}."
            )

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back.

        Raises:
            EngineFailure: there are not that many.
        """
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise EngineFailure(f"The structure cannot go back by {num_tokens} tokens.")

    def fork(self) -> LLGuidanceMatcher:
        """An independent twin in the same state."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._tokenizer_end_ids, self._end_ids)

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next; empty where there is a choice, or the structure may end."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    @property
    def is_accepting(self) -> bool:
        """Whether the answer so far satisfies the structure."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether it does, and nothing can follow."""
        return bool(self._matcher.is_stopped()) and bool(self._matcher.is_accepting())


def _slices() -> list[str]:
    """Sets of tokens that are allowed or not as a whole, without a look at each; words are one of ours."""
    blanks, *texts = llguidance.LLTokenizer.general_slices()
    return [blanks, "[a-zA-Z0-9]+", *texts]


def _options(whitespace: Whitespace, coerce_one_of: bool = False) -> dict[str, Any]:
    # All that weakens is written out, since a schema may bring options of its own.
    return {**_WHITESPACE[whitespace], "whitespace_pattern": None, "coerce_one_of": coerce_one_of, "lenient": False}


def _schema_text(schema: Any, whitespace: Whitespace, coerce_one_of: bool = False) -> str:
    as_object = schema if isinstance(schema, dict) else {"allOf": [schema]}
    schema_json = json.dumps({**as_object, "x-guidance": _options(whitespace, coerce_one_of)}, ensure_ascii=False)
    text: str = llguidance.LLMatcher.grammar_from_json_schema(utf8(schema_json))
    return text


def _one_of_problem(grammar: str) -> bool:
    if '"oneOf"' not in grammar:
        return False
    return "oneOf constraints are not supported" in llguidance.LLMatcher.validate_grammar(grammar)


def _from_ebnf(text: str) -> str:
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare Exception for what it finds
        raise InvalidRequest(
            f"The grammar is malformed: {_first_line(str(error))}. It needs rules name ::= …, and one named root."
        ) from None
    return lark


def _escaped(choice: str) -> str:
    return "".join(f"\\{c}" if c in _REGEX_SPECIAL else f"\\x{{{ord(c):X}}}" if ord(c) < 32 else c for c in choice)


def _refusal(message: str) -> Exception:
    """llguidance's message as an error of ours."""
    first = _first_line(message)
    if "Unimplemented" in message or "not supported" in message:
        return Unsupported(f"The structure cannot be enforced: {first}.")
    if any(word in message for word in _LIMIT_WORDS):
        return LimitExceeded(f"The structure is too complex: {first}. Simplify it, or split it over several requests.")
    if "NoExtension" in message or "nsatisfiable" in message or "empty" in message:
        return InvalidRequest(f"No text can satisfy the structure: {first}.")
    return InvalidRequest(f"The structure is malformed: {first}.")


def _first_line(message: str) -> str:
    """What matters of a message, on one line of bounded length."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "non-verbose" not in line]
    error = next((line for line in lines if line.startswith("error:")), None)
    text = f"{lines[0]} {error}" if error and lines and error != lines[0] else " ".join(lines[:1])
    return text[:300].rstrip(".")


def _set_bit(bitmask: np.ndarray, token_id: int, value: bool) -> None:
    words = bitmask.view("uint32")
    bit = 1 << (token_id & 31)
    word = int(words[token_id >> 5])
    words[token_id >> 5] = word | bit if value else word & ~bit
