"""Every family against logits and greedy tokens that transformers computed (tests/tools/make_family_references.py)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine_driver import FAMILIES, make_request, running_engine

NAMES = sorted(p.name for p in FAMILIES.iterdir())


@pytest.mark.parametrize("family", NAMES)
def test_logits_and_greedy_tokens_equal_the_reference(family):
    reference = np.load(FAMILIES / family / "reference.npz")
    prompt = reference["prompt_ids"].tolist()
    with running_engine(family) as driver:
        request = make_request("r", prompt, max_tokens=32, return_context_logits=True, return_log_probs=True)
        answer = driver.run(request)["r"]
    logits = answer.events[0].context_logits
    np.testing.assert_allclose(logits[reference["positions"]], reference["logits"], atol=2e-3, rtol=1e-3)
    assert answer.tokens[0] == reference["greedy_ids"].tolist()
    np.testing.assert_allclose(answer.events[-1].sequences[0].log_probs, reference["greedy_log_probs"], atol=2e-3)


@pytest.mark.parametrize("family", NAMES)
def test_the_fast_precision_stays_close_to_the_reference(family):
    reference = np.load(FAMILIES / family / "reference.npz")
    with running_engine(family, precision="fast") as driver:
        request = make_request("r", reference["prompt_ids"].tolist(), max_tokens=1, return_context_logits=True)
        logits = driver.run(request)["r"].events[0].context_logits[reference["positions"]]
    spread = reference["logits"].std()
    assert np.abs(logits - reference["logits"]).mean() < 0.05 * spread
