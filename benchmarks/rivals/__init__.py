"""What training on a slow network is compared with, and the same interface to this library's own optimizers."""
