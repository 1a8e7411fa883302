"""Runs side by side: their curves over steps, tokens, time and bytes, and what each took to the same loss.

runs       a run folder's metrics and settings
grouping   which runs can be compared, and which differ in the seed alone
curves     losses over an axis, the mean of several seeds and their band
summary    one row of numbers for each group
charts     what is drawn, as data; ``svg``, ``pictures`` and ``page`` draw it
"""
