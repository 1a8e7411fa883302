"""What training costs, from its settings, for ``plan`` and ``training``.

volume     bytes that each step of a run sends
memory     bytes that a process takes
cluster    rates of machines and links, and what collectives take
run_time   seconds of one step, and of a run with each optimizer
"""
