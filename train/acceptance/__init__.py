"""What a draft is worth: acceptance on held-out samples, and real speculative decoding."""
