"""What a run reports.

metrics        a line for each logging interval, the meter that adds up its steps, and the closing account of traffic
writers        console, metrics.jsonl, TensorBoard, and the recorder that hands metrics to all of them
wandb_writer   a run at wandb
run_directory  the folder of a run: settings, environment, heartbeat
"""
