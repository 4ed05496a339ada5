"""EAGLE's training data: one .ckpt of torch.save for each conversation, with the target's last hidden state."""
