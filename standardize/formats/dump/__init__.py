"""The generic dump: per-layer, per-rank files as a patch of one's own writes them, described by a small TOML."""
