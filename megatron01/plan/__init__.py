"""Planning of a run before it starts, with the models of ``megatron01.cost``.

command   ``megatron01 schedule`` and ``megatron01 plan``, whose settings are in ``settings``
schedule  synchronizations and traffic of each step
forecast  run time and memory
"""
