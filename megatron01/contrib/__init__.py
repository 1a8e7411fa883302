"""Support for other projects: DeepSpeed's configurations, NVIDIA's apex."""
