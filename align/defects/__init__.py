"""Names what is wrong with stored states, from the shape of their error against the replayed target.

Each slot of each replayed sample is examined alone. What matches a tap within rounding (align/noise.py) is that tap.
For the rest hypotheses are tried, cheap ones first, and one is accepted only where it explains the rows down to
rounding: a scale, rows of another place or sample (align/rows.py), a layer's pieces and partial sums
(align/pieces.py), another layout of the slots, permuted channels, a context that was cut. What is still a tap, but
farther from it than rounding, is other weights or a quantization (align/weights.py). Nothing is named on a guess: what
no hypothesis explains is "undecided" inside the noise's band between, and "no tap of this target" outside it.

Shapes: T rows, H hidden_size, L layers.
"""
