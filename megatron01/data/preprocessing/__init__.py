"""From text to token files: ``megatron01 preprocess``.

inputs      resolves ``--input`` to sources; Parquet files and Hugging Face data sets
corpus      sources, positions in them, and chunks for workers; files and pipes of JSON lines or text
documents   decodes chunks to texts; ``sentences`` splits them
encoding    texts to token ids, in several processes
preprocess  a whole run, which resumes after an interruption
"""
