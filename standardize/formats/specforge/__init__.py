"""SpecForge offline features: one .ckpt of torch.save for each sample."""
