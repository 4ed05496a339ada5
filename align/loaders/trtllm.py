"""TensorRT-LLM: embeddings are the target's, a missing head is too; how many taps fc takes is in the serving config.

Read in NVIDIA/TensorRT-LLM at commit 00679c6 (2026, no release tied to it):

    tensorrt_llm/_torch/models/modeling_speculative.py   ``Eagle3DraftModel``: norm_before_fc inside eagle_config alone,
        fc_norm at the top level and instead of it, norm_output at the top level or as
        eagle_config.return_hidden_post_norm, no norm_before_residual; MLA where the config has kv_lora_rank.
        ``Eagle3ForCausalLM.load_weights`` turns layers.{i} into midlayer (of several layers: midlayer.{i}) and puts
        ``model.`` before every name but lm_head's, so that a prefix of the checkpoint's own makes a name that nothing
        asks for. Embeddings are the target's unless target_hidden_size differs; the head is, where no name has lm_head
        in it. A missing draft_vocab_size is vocab_size, with a warning
    tensorrt_llm/_torch/models/modeling_utils.py   ``_load_weights_impl`` (in another revision): modules ask for their
        tensors; unknown ones are dropped without a word, and a module that finds none keeps what was in memory
    tensorrt_llm/_torch/models/modeling_auto.py   with two models the class is looked up as ``EAGLE3`` and the
        architecture without ``Eagle3`` (EAGLE3LlamaForCausalLM is known); with one it is eagle3_model_arch of the
        serving config, and the architecture is not looked at

Whether rotary embeddings are taken from rope_parameters depends on its release of transformers: unknown.
"""

from typing import Any

from eyas.align.draft import DraftConfig
from eyas.align.loaders.base import ABSENT, TOP, Family, Flag, Loader


def _attention(config: DraftConfig) -> str:
    return "MLA" if config.layer.get("kv_lora_rank") else "Llama"


def _loader(family: Family, attention: str, **differences: Any) -> Loader:
    return Loader(
        system="trtllm",
        versions=None,
        source="tensorrt_llm/_torch/models/modeling_speculative.py",
        family=family,
        architectures=frozenset({attention}),
        architecture=_attention,
        layer_names=("midlayer.{i}.", "midlayer.", "layers.{i}."),
        num_taps_places=("speculative_config.eagle3_layers_to_capture",),
        flags={
            "norm_before_residual": ABSENT,
            "norm_before_fc": Flag(places=("eagle_config.norm_before_fc",)),
            "fc_norm": TOP["fc_norm"],
            "norm_output": Flag(places=("eagle_config.return_hidden_post_norm", "norm_output")),
        },
        reads_rope_parameters=None,
        later_layer_norm="hidden_norm",
        unknown_tensors="dropped",
        dropped=(),
        embeddings="target",
        missing_head="target",
        head_without_draft_vocab="own",
        **differences,
    )


LOADERS = (
    _loader("llama", "Llama", reads_attention_bias=True),
    _loader("deepseek", "MLA", reads_attention_bias=False),
)
