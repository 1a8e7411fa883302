"""Detection of NVIDIA's apex (https://github.com/NVIDIA/apex), whose fused kernels are used if it is installed.

It is not on PyPI: the package named ``apex`` there is unrelated, and is recognized and never used.
"""

from __future__ import annotations

import importlib.util

import torch

from megatron01.config import FusedKernels
from megatron01.errors import UserError

_INSTALL = "install NVIDIA's from https://github.com/NVIDIA/apex with its CUDA extensions"


def uses_apex(choice: FusedKernels, *, setting: str, module: str, extension: str) -> bool:
    """True if a module of apex is to be used. Raises UserError if apex is chosen and does not work here.

    With ``auto`` it is used if it works here: ``module``, such as apex.normalization, and its compiled ``extension``.
    """
    if choice == "torch":
        return False
    problem = None
    if importlib.util.find_spec("apex") is None:
        problem = f"apex is not installed; {_INSTALL}"
    elif not _exists(module):
        problem = (
            "the package apex that is installed is not NVIDIA's but an unrelated one of that name, the one on PyPI;"
            f" remove it (pip uninstall apex) and {_INSTALL}"
        )
    elif not _exists(extension):
        problem = f"apex is installed without {extension}; {_INSTALL}"
    elif not torch.cuda.is_available():
        problem = "torch sees no GPU, which apex needs; start on a machine with one"
    if problem is not None and choice == "apex":
        raise UserError(f"{setting} is apex, but {problem}, or give --{setting.replace('_', '-')} torch")
    return problem is None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # finding a submodule runs the package's own code, which may raise anything
        return False
