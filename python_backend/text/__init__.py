"""Text on its way in and out: tokens, chat templates, word lists, stop strings. Knows nothing of Triton or the engine."""
