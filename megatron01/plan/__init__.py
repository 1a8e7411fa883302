"""Planning of a run before it starts, with the models of ``megatron01.cost``.

schedule  synchronizations and traffic of each step: ``megatron01 schedule``
forecast  run time and memory: ``megatron01 plan``
"""
