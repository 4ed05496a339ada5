"""NVIDIA ModelOpt's offline hidden states: one .pt of torch.save for each conversation."""
