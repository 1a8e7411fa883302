"""Monitoring of a run.

metrics        a line for each logging interval, the meter that adds up its steps, and the summary of traffic
writers        console, metrics.jsonl, TensorBoard, and the recorder that passes metrics to all of them
wandb_writer   a run at wandb
run_directory  the folder of a run: settings, environment, heartbeat
"""
