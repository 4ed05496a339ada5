"""Training of EAGLE-3 draft heads from shards: the draft, its loss, batches, the loop, acceptance, export."""
