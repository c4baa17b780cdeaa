"""Text on its way in and out: tokens, chat templates, words, stop strings. Knows nothing of Triton or the engine."""
