"""The decoder-only GPT that memo trains: model, data, training loop."""
