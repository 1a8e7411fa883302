"""What a run will do, computed before it starts, from ``megatron01.cost``.

schedule  when it synchronizes and what each step sends: ``megatron01 schedule``
forecast  how long it takes, with how much memory: ``megatron01 plan``
"""
