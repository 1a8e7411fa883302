"""Text to token ids and back: the tokenizers of a run, and the training of new vocabularies."""
