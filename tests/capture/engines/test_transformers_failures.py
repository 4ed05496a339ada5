"""What a capture refuses, rejects or survives: samples, targets and options that do not work out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from eyas.capture.engines.base import EngineSettings, Sealed
from eyas.capture.engines.transformers.engine import TransformersEngine, check_settings
from eyas.capture.engines.transformers.load import hash_weights, read_outline
from eyas.capture.engines.transformers.parallel import check_tp
from eyas.capture.errors import SelfTestError, TargetError
from eyas.shards.errors import ShardWriteError
from eyas.shards.writer import ShardWriter
from eyas.taps.notation import EMBED, FINAL, TapError, after
from tests.capture.engines.families import build_target, run_capture, sink_for, token_samples, tokens_sample, work_of

LENGTHS = [5, 9, 14, 3, 20, 11, 8]


def settings_for(target: Path, **options: Any) -> EngineSettings:
    return EngineSettings(
        target=str(target), **{"taps": (after(0), FINAL), "dtype": "float32", "device": "cpu"} | options
    )


# Samples


def test_samples_with_nan_are_rejected_and_the_others_are_not(tmp_path: Path) -> None:
    def poison(model: Any) -> None:
        model.model.embed_tokens.weight.data[94] = float("nan")

    target = build_target(tmp_path / "target", "LlamaForCausalLM", poison)
    bad = tokens_sample([5, 6, 94, 7])
    good = token_samples(LENGTHS)
    captured = run_capture(target, tmp_path / "dataset", [*good, bad], batch_tokens=40, taps=(EMBED, after(1)))
    assert captured.rejects == {bad.sample_id: captured.rejects[bad.sample_id]}
    # One embedding of 32 channels; attention then multiplies its masked values by 0, so no row stays whole.
    assert captured.rejects[bad.sample_id] == (
        "NaN or Inf in the captured tensors: 32 in embed, 128 in after:1, 128 in last_hidden (after:3)"
    )
    assert sorted(captured.sealed_ids) == sorted(sample.sample_id for sample in good)


def test_infinite_logits_are_a_reject(tmp_path: Path) -> None:
    def overflow(model: Any) -> None:
        model.lm_head.weight.data[50] = float("inf")

    target = build_target(tmp_path / "target", "LlamaForCausalLM", overflow)
    samples = [tokens_sample([5, 6, 7, 8])]
    captured = run_capture(target, tmp_path / "dataset", samples, self_test=False)
    assert list(captured.rejects.values()) == ["NaN or Inf in the target's logits at 3 tokens"]


def test_samples_that_do_not_fit_the_target_are_rejected_with_the_reason(
    targets: Callable[[str], Path], tmp_path: Path
) -> None:
    long, strange, negative, good = (
        token_samples([65])[0],
        tokens_sample([5, 96, 7]),
        tokens_sample([5, -1]),
        token_samples([64])[0],
    )
    captured = run_capture(targets("LlamaForCausalLM"), tmp_path / "dataset", [long, strange, negative, good])
    assert captured.rejects == {
        long.sample_id: "65 tokens, and the target's positions allow 1 to 64",
        strange.sample_id: "token id 96 is outside the target's vocabulary of 96",
        negative.sample_id: "token id -1 is outside the target's vocabulary of 96",
    }
    assert captured.sealed_ids == [good.sample_id]


def test_a_batch_out_of_memory_is_halved_until_it_fits(
    targets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sizes = LlamaModel.forward, []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows, width = kwargs["input_ids"].shape
        sizes.append((rows, width))
        if rows > 2 or width == 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, *args, **kwargs)

    samples = token_samples(LENGTHS)
    target = targets("LlamaForCausalLM")
    settings = settings_for(target, batch_tokens=1000)
    with TransformersEngine(settings) as engine:
        monkeypatch.setattr(LlamaModel, "forward", forward)
        sink = sink_for(engine, settings, tmp_path / "dataset")
        events = list(engine.capture(work_of(samples), sink, lambda: False))
    monkeypatch.undo()
    sealed = [i for event in events if isinstance(event, Sealed) for i in event.shard.sample_ids]
    rejected = {event.sample_id: event.reason for event in events if hasattr(event, "reason")}
    assert sizes[0] == (7, 20)
    assert rejected == {samples[4].sample_id: "out of memory on cpu, alone in its batch, with 20 tokens"}
    assert sorted(sealed) == sorted(sample.sample_id for sample in samples if sample.num_tokens != 20)


def test_a_sample_whose_forward_raises_is_rejected_alone(
    targets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (kwargs["input_ids"] == 95).any():
            raise RuntimeError("no kernel for this\nand more")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    bad, good = tokens_sample([5, 95, 7]), token_samples(LENGTHS)
    captured = run_capture(targets("LlamaForCausalLM"), tmp_path / "dataset", [bad, *good], self_test=False)
    assert captured.rejects == {bad.sample_id: "the target's forward failed: RuntimeError: no kernel for this"}
    assert sorted(captured.sealed_ids) == sorted(sample.sample_id for sample in good)


# Stopping


def test_stopping_seals_what_went_through_and_leaves_the_rest(targets: Callable[[str], Path], tmp_path: Path) -> None:
    asked = []

    def should_stop() -> bool:
        asked.append(True)
        return len(asked) > 3

    samples = token_samples(LENGTHS)
    captured = run_capture(
        targets("LlamaForCausalLM"), tmp_path / "dataset", samples, batch_tokens=1, should_stop=should_stop
    )
    assert len(captured.sealed_ids) == 3
    assert captured.dataset.num_samples == 3


def test_an_iterator_closed_early_seals_no_more(targets: Callable[[str], Path], tmp_path: Path) -> None:
    settings = settings_for(targets("LlamaForCausalLM"), batch_tokens=1)
    with TransformersEngine(settings) as engine:
        sink = sink_for(engine, settings, tmp_path / "dataset")
        events = engine.capture(work_of(token_samples(LENGTHS)), sink, lambda: False)
        next(events)
        events.close()
        # The worker's name is free again.
        assert len(list(engine.capture(work_of(token_samples([4])), sink, lambda: False))) == 2


def test_an_error_while_writing_comes_out_of_capture(
    targets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(self: ShardWriter, *_: Any) -> list[Any]:
        raise ShardWriteError("no space left")

    monkeypatch.setattr(ShardWriter, "add", add)
    with pytest.raises(ShardWriteError, match="no space left"):
        run_capture(targets("LlamaForCausalLM"), tmp_path / "dataset", token_samples([6] * 20), batch_tokens=6)


# Targets


def test_a_checkpoint_with_missing_weights_is_refused(targets: Callable[[str], Path], tmp_path: Path) -> None:
    def drop(model: Any) -> None:
        model.model.layers = model.model.layers[:3]

    target = build_target(tmp_path / "target", "LlamaForCausalLM", drop)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with (
        pytest.raises(TargetError, match=r"missing from the checkpoint and would be random: model\.layers\.3\."),
        TransformersEngine(settings_for(target)),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(architectures=["T5ForConditionalGeneration"]), "is an encoder-decoder"),
        (transformers.LlamaConfig(), "names no architecture"),
    ],
)
def test_configurations_of_no_causal_language_model_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=message):
        read_outline(str(tmp_path))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="its configuration cannot be read"):
        read_outline(str(tmp_path))


def test_a_target_without_lm_head_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    with (
        pytest.raises(TargetError, match="LlamaModel has no language model head"),
        TransformersEngine(settings_for(tmp_path)),
    ):
        pass


def test_a_target_without_a_final_norm_is_refused(targets: Callable[[str], Path], tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=96,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        do_layer_norm_before=False,
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="expected a final norm"), TransformersEngine(settings_for(tmp_path)):
        pass


def test_layers_that_are_not_one_after_another_are_refused(
    targets: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = self.layers
        self.layers = torch.nn.ModuleList([layers[0], layers[2], layers[1], layers[3]])
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.layers = layers

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with (
        pytest.raises(TargetError, match=r"found 0; model\.layers: entries were called in the order \[0, 2, 1, 3\]"),
        TransformersEngine(settings_for(targets("LlamaForCausalLM"))),
    ):
        pass


def test_logits_that_are_not_reproduced_refuse_statistics_alone(
    targets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits**3
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    target, samples = targets("LlamaForCausalLM"), token_samples([6, 4])
    with pytest.raises(SelfTestError, match="--no-target-statistics"):
        run_capture(target, tmp_path / "with", samples)
    assert len(run_capture(target, tmp_path / "without", samples, target_statistics=False).sealed_ids) == 2


def test_the_self_test_names_the_tap_that_a_tensor_really_is(
    targets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A target whose whole model counts its layers otherwise than its text model does.
    plain = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if output.hidden_states is not None:
            first, second, *rest = output.hidden_states
            output.hidden_states = (second, first, *rest)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(SelfTestError, match=r"after:0 is not what transformers gives as after:0.*nearest is embed"):
        run_capture(targets("LlamaForCausalLM"), tmp_path / "dataset", token_samples([6, 4]))


def test_a_probe_of_nan_alone_refuses_the_target(tmp_path: Path) -> None:
    def poison(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.data[3, 4] = float("nan")

    target = build_target(tmp_path / "target", "LlamaForCausalLM", poison)
    with pytest.raises(SelfTestError, match=r"every token of the probe has NaN or Inf"):
        run_capture(target, tmp_path / "dataset", token_samples([6, 4]), target_statistics=False)


def test_a_tap_that_does_not_exist_is_refused_before_loading(targets: Callable[[str], Path]) -> None:
    with (
        pytest.raises(TapError, match="after:4 does not exist"),
        TransformersEngine(settings_for(targets("LlamaForCausalLM"), taps=(after(4),))),
    ):
        pass


# Tensor parallelism, from the configuration alone


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (
            transformers.LlamaConfig(
                hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536
            ),
            3,
            None,
        ),
        (
            transformers.LlamaConfig(
                hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536
            ),
            2,
            "--tp 2 does not divide this target's 9 attention heads and 3 key/value heads: use --tp 1 or 3",
        ),
        (transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=8, intermediate_size=100), 8, "100 chan"),
        (transformers.Qwen3MoeConfig(moe_intermediate_size=12), 8, "12 channels of an expert"),
        (transformers.MixtralConfig(intermediate_size=100), 8, "100 channels of an expert"),
        (transformers.DeepseekV3Config(), 8, None),
        (transformers.GPT2Config(), 2, "no tensor-parallel plan for gpt2; use --tp 1, with --dp 2"),
        (transformers.GPT2Config(), 1, None),
        (transformers.Gemma3Config(text_config={"num_key_value_heads": 1}), 2, "1 key/value heads: use --tp 1 "),
    ],
)
def test_tp_that_does_not_divide_is_refused(config: Any, tp: int, message: str | None) -> None:
    if message is None:
        check_tp(config, tp)
    else:
        with pytest.raises(TargetError, match=message):
            check_tp(config, tp)


def test_settings_are_checked_without_loading(targets: Callable[[str], Path]) -> None:
    outline = read_outline(str(targets("GPT2LMHeadModel")))
    assert (outline.num_layers, outline.max_positions, outline.dtype) == (4, 64, "float32")
    with pytest.raises(TargetError, match="no tensor-parallel plan"):
        check_settings(outline, settings_for(targets("GPT2LMHeadModel"), tp=2))


# Hashes


def test_the_weights_hash_sees_a_changed_checkpoint(targets: Callable[[str], Path], tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.model.layers[2].mlp.up_proj.weight.data[0, 0] += 1

    same = build_target(tmp_path / "same", "LlamaForCausalLM")
    other = build_target(tmp_path / "other", "LlamaForCausalLM", change)
    first = hash_weights(str(targets("LlamaForCausalLM")), None)
    assert first == hash_weights(str(same), None)
    assert first != hash_weights(str(other), None)
