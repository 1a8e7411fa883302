"""From text to token files: ``megatron01 preprocess``.

inputs      resolves ``--input`` to sources; Parquet files and Hugging Face data sets
corpus      sources, positions in them, and chunks for workers; files and pipes of JSON lines or text
encoding    chunks to texts, which ``sentences`` splits, and to token ids, in several processes
preprocess  a whole run, which resumes after an interruption
"""
