"""What training costs, from its settings: bytes sent, memory, time on a cluster; for ``plan`` and ``training``."""
