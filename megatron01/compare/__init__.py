"""Comparison of runs and live monitoring: ``megatron01 compare`` and ``megatron01 watch``.

runs         metrics and settings of a run folder
grouping     runs by task and by setting (over seeds), and mean curves of groups
summary      one row of numbers for each group
conclusions  the rows as a table, and what follows from them in sentences
charts       line and bar charts; ``page`` puts them into HTML
"""
