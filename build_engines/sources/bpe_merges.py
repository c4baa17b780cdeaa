"""The merge list that makes plain BPE choose what SentencePiece's scores choose."""

from __future__ import annotations

_NORMAL, _USER_DEFINED = 1, 4


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """Every way to make a token out of two others, the best score first.

    SentencePiece joins the neighbours whose joint piece scores highest; a BPE with these merges in this order
    does the same. Equal scores (all runs of blanks, often) go by the id of the joint piece, then of its left part.
    Pieces that are no text (control, byte, unused) take no part.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[token_id], token_id, ids[left], ids[right], left, right))
    found.sort(key=lambda merge: merge[:4])
    return [[left, right] for *_, left, right in found]
