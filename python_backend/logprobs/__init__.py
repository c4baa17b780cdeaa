"""Log-probabilities that people can read: tokens with text, bytes and offsets, as OpenAI's clients know them."""
