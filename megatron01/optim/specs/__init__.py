"""The optimizers as the framework sees them, one ``SPEC`` a module; none of them imports torch before it builds."""
