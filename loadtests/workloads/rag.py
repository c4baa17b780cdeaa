"""Questions about documents: a long text that many requests share, a short question behind it."""

from __future__ import annotations

import itertools

from loadtests.workloads.base import FIXED_LENGTH, Item, Setting, Workload, log_normal, zipf

_DOCUMENTS = 12
_DOCUMENT_TOKENS = 480


class Rag(Workload):
    """Which share of the prompt tokens can come from the prefix cache is known: each item says how many repeat."""

    name = "rag"
    about = (
        f"Questions about {_DOCUMENTS} documents of {_DOCUMENT_TOKENS} tokens, popular ones asked more often (Zipf), "
        "about 24 tokens of question, 16 to 64 to answer."
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._first_uses: dict[int, int] = {}

    def item(self, index: int) -> Item:
        """The request at a position."""
        document = self._document(index)
        seen = self._first_use(document) < index
        rng = self.rng("question", index)
        text, tokens = self.prose(_DOCUMENT_TOKENS, "document", document)
        question, _ = self.prose(log_normal(rng, 24, 0.3, 8, 64), "question", index)
        fields = {"text_input": f"{text}\n\nQuestion: {question} Why?\nAnswer:", **FIXED_LENGTH}
        length = log_normal(rng, 32, 0.4, 16, 64)
        return Item(index, self.name, fields, length, shared_tokens=tokens if seen else 0)

    def _document(self, index: int) -> int:
        return zipf(self.rng("document", index), _DOCUMENTS)

    def _first_use(self, document: int) -> int:
        if document not in self._first_uses:
            self._first_uses[document] = next(i for i in itertools.count() if self._document(i) == document)
        return self._first_uses[document]
