"""Cost model of training, from its settings, for ``plan`` and ``training``.

volume     bytes sent by each step of a run
memory     memory of a process
cluster    compute and link rates, and times of collectives
run_time   time of one step, and of a run with each optimizer
"""
