"""What belongs to other projects: DeepSpeed's configurations, NVIDIA's apex."""
