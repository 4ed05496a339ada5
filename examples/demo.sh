#!/bin/sh
# The main job on a real model: real conversations -> tokens and masks -> hidden states -> verified training shards.
# Usage: sh examples/demo.sh FOLDER
set -eu
out=$1

say() { printf '\n$ %s\n' "$*"; "$@"; }

python "$(dirname "$0")/demo_target.py" "$out"
say eyas prepare "$out/sharegpt.json" "$out/prepared" --target "$out/target" --max-samples 64 --max-tokens 1024
say eyas capture "$out/prepared" "$out/captured" --target "$out/target" --taps default
say eyas status "$out/captured"
say eyas standardize "$out/captured" "$out/standard" --taps default
say eyas inspect "$out/standard" --verify
