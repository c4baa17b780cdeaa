"""Where weights and tokenizers come from; every source ends as a Hugging Face checkpoint directory."""
