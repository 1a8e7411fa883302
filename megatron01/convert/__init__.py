"""Models in other people's formats: Hugging Face folders both ways, and Megatron-LM's files on the way in.

Every reader gives a ``PortableModel`` (``portable``), every writer takes one.
"""
