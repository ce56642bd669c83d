"""Runs a compiled SAM 3: photographs and prompts in, masks out."""

VOCABULARY_FILE = "bpe_simple_vocab_16e6.txt.gz"
"""Name of the file with the tokenizer's vocabulary, which CLIP published."""
