"""speculators, the trainer: what a checkpoint in its format was trained as, and so what an engine has to repeat.

Read in 0.9.0: speculators/models/eagle3/config.py (every norm switch is false where the key is missing; the trainer's
own option for norm_before_residual is true by default, and is written out), core.py (num_aux from
eagle_aux_hidden_state_layer_ids, else 3), model_definitions.py (layers after the first are plain decoder layers) and
model.py (embeddings and lm_head are the verifier's where the checkpoint has none).
"""

from eyas.align.loaders.base import TOP, Family, Loader


def _loader(family: Family) -> Loader:
    return Loader(
        system="speculators",
        versions=("0.9.0", "0.9.0"),
        source="speculators/models/eagle3/config.py",
        family=family,
        architectures=frozenset({family}),
        architecture=lambda config: str(config.layer.get("model_type", "qwen3")),
        layer_names=("layers.{i}.",),
        num_taps_places=("eagle_aux_hidden_state_layer_ids",),
        flags=TOP,
        reads_rope_parameters=True,
        reads_attention_bias=True,
        later_layer_norm="input_layernorm",
        unknown_tensors="dropped",
        dropped=(),
        embeddings="own",
        missing_head="target",
        head_without_draft_vocab="own",
    )


LOADERS = (_loader("llama"), _loader("qwen3"))
