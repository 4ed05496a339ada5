"""TorchSpec's offline files: one .ckpt of torch.save for each conversation."""
