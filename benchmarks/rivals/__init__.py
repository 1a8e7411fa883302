"""The contestants of the slow-network benchmark: other methods and this library's optimizers, with one interface."""
