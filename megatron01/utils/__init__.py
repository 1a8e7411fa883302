"""Helpers that know nothing of training.

files         atomic writing, locked files, what is shipped with the package
ownership     one job at a time writes to a folder
signals       requests to stop
process_pool  worker processes
formatting    numbers, tables and curves as text; ``plotting`` as pictures
compilation   kernels by numba, and their machine code on disk
precision     types of weights, and devices that compute in them
"""
