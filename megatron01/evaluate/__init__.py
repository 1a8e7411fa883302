"""What a trained model is good for: generating text, filling masks, and how well it predicts held-out text."""
