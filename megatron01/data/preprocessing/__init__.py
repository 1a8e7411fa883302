"""From text to token files: ``megatron01 preprocess``.

inputs      from what ``--input`` names to sources; Parquet files and Hugging Face data sets
corpus      sources, places in them, and the chunks that workers get; files and pipes of JSON lines or text
documents   from a chunk's bytes to texts; ``sentences`` cuts them
encoding    texts to token ids, in several processes
preprocess  a whole run, and how it goes on after an interruption
"""
