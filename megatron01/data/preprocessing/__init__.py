"""From files of text to token files: reading of corpora, sentences, encoding, the command."""
