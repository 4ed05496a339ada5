#!/bin/sh
# The main job on a real model: real questions -> the target's own answers -> hidden states -> verified training shards
# -> a draft head, trained, judged by real speculative decoding, exported.
# Usage: sh examples/demo.sh FOLDER
set -eu
out=$1
here=$(dirname "$0")

say() { printf '\n$ %s\n' "$*"; "$@"; }

python "$here/demo_target.py" "$out"
say eyas regenerate "$out/sharegpt.json" "$out/answers.jsonl" --target "$out/target" \
    --max-samples 320 --max-tokens 224 --max-new-tokens 96
say eyas prepare "$out/answers.jsonl" "$out/prepared" --target "$out/target"
say eyas capture "$out/prepared" "$out/captured" --target "$out/target" --taps default
say eyas status "$out/captured"
say eyas standardize "$out/captured" "$out/standard" --taps default
say eyas inspect "$out/standard" --verify
say eyas check "$out/standard" --target "$out/target"
# bfloat16 is twice as fast as float32 on a CPU that has it.
say eyas train "$out/standard" "$out/run" --target "$out/target" --draft-vocab-size 8192 --fc-norm --norm-output \
    --learning-rate 3e-3 --batch-tokens 512 --epochs 3 --dtype bfloat16
say eyas eval "$out/run" --decode "$here/prompts.jsonl" --max-new-tokens 48 --baselines --dtype float32
say eyas export "$out/run" "$out/draft" --engine sglang@0.5.23
say eyas check "$out/standard" --draft "$out/draft" --engine sglang@0.5.23 --target "$out/target" --replay 0
