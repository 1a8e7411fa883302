"""Helpers that do not depend on training.

files           atomic writes, file locks, files shipped with the package
ownership       exclusive ownership of an output folder by one job
signals         stop requests: signals and time limit
process_pool    worker processes
formatting      numbers, tables and sparklines as text
compilation     numba kernels and their cache on disk
precision       dtypes of weights, and devices that support them
random_numbers  seeds and states of random-number generators
system          cores and memory of this process, on Linux and macOS
"""
