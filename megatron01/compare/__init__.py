"""Runs side by side, and one run followed: ``megatron01 compare`` and ``megatron01 watch``.

runs       a run folder's metrics and settings
grouping   which runs can be compared, which differ in the seed alone, and their mean curves
summary    one row of numbers for each group, and the sentences that they allow
charts     curves and bars, and their pictures; ``page`` puts them into HTML
"""
