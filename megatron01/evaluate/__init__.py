"""Evaluation of trained models: generating text, filling masks, and perplexity on held-out text."""
