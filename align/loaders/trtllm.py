"""TensorRT-LLM: embeddings are the target's, a missing head is too; how many taps fc takes is in the serving config.

Read in NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/models/modeling_speculative.py at commit 00679c6 (2026, no release
tied to it), classes ``Eagle3DraftModel`` and ``Eagle3ForCausalLM``: norm_before_fc is read inside eagle_config alone,
fc_norm at the top level and goes first, norm_output at the top level or as eagle_config.return_hidden_post_norm; there
is no norm_before_residual. Which architecture names lead there, and what becomes of tensors that are unknown or
missing, was not read: both are unknown.
"""

from eyas.align.loaders.base import ABSENT, TOP, Flag, Loader

LOADERS = (
    Loader(
        system="trtllm",
        versions=None,
        source="tensorrt_llm/_torch/models/modeling_speculative.py",
        family="llama",
        architectures=None,
        layer_names=("midlayer.{i}.", "midlayer.", "layers.{i}."),
        num_taps_places=("speculative_config.eagle3_layers_to_capture",),
        flags={
            "norm_before_residual": ABSENT,
            "norm_before_fc": Flag(places=("eagle_config.norm_before_fc",)),
            "fc_norm": TOP["fc_norm"],
            "norm_output": Flag(places=("eagle_config.return_hidden_post_norm", "norm_output")),
        },
        reads_rope_parameters=True,
        reads_attention_bias=True,
        later_layer_norm="hidden_norm",
        unknown_tensors="unknown",
        dropped=(),
        missing_tensors="unknown",
        embeddings="target",
        missing_head="target",
        head_without_draft_vocab="own",
    ),
)
