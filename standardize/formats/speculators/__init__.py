"""speculators 0.9: an Arrow dataset of tokens, and a safetensors file of hidden states for each of its rows."""
