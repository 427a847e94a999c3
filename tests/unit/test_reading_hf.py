"""Hugging Face configurations as targets."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.errors import OptionError, TargetError
from apportion.reading import check_batch, read_target

pytest.importorskip("transformers", reason="Hugging Face targets need transformers")

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 100,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 90,
    "max_position_embeddings": 48,
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}
SPEECH = {
    "model_type": "wav2vec2",
    "architectures": ["Wav2Vec2ForCTC"],
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_conv_pos_embedding_groups": 2,
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_config(config: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return f"hf:{tmp_path}"

    return write_config


def test_a_causal_model_is_built_from_its_configuration(write: Any) -> None:
    target = write(GPT2)
    parts = read_target(target)
    batch = parts.example(3)
    assert type(parts.model()).__name__ == "GPT2LMHeadModel"
    assert {name: tuple(leaf.shape) for name, leaf in batch.items()} == {
        "input_ids": (3, 64),
        "labels": (3, 64),
    }
    assert (parts.loss, parts.data, parts.tokens_per_sample) == (None, None, 64)
    assert check_batch(parts, parts.model(), batch) == pytest.approx(4.6, abs=0.3)  # ln 100
    assert read_target(target + "/config.json").fingerprint == parts.fingerprint


def test_it_builds_without_memory_for_weights(write: Any) -> None:
    parts = read_target(write(GPT2), overrides={"n_layer": "48", "n_embd": "1600", "n_head": "25"})
    with torch.device("meta"):
        model = parts.model()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) > 1_400_000_000


def test_the_same_seed_gives_the_same_weights_and_tokens(write: Any) -> None:
    target = write(GPT2)
    first, again, other = (read_target(target, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.example(2)["input_ids"], again.example(2)["input_ids"])
    assert not torch.equal(first.example(2)["input_ids"], other.example(2)["input_ids"])
    pairs = zip(first.model().parameters(), again.model().parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize(
    ("config", "kind", "keys"),
    [
        (BERT, "BertForMaskedLM", {"input_ids", "labels"}),  # the encoder alone has no causal loss by default
        ({**BERT, "architectures": ["BertModel"]}, "Bert", {"input_ids", "labels"}),
        (
            {**BERT, "architectures": ["BertForPreTraining"]},
            "BertForPreTraining",
            {"input_ids", "labels", "next_sentence_label"},
        ),
        (
            {**BERT, "architectures": ["BertForSequenceClassification"]},
            "BertForSequenceClassification",
            {"input_ids", "labels"},
        ),
        (VIT, "ViTForImageClassification", {"pixel_values", "labels"}),
        pytest.param(SPEECH, "Wav2Vec2ForCTC", {"input_values", "labels"}, marks=pytest.mark.slow),
    ],
)
def test_other_kinds_of_model(write: Any, config: dict[str, Any], kind: str, keys: set[str]) -> None:
    parts = read_target(write(config))
    assert type(parts.model()).__name__.startswith(kind[:4])
    assert set(parts.example(2)) == keys
    assert check_batch(parts, parts.model(), parts.example(2)) > 0


def test_overrides_and_sequence_length(write: Any) -> None:
    target = write(GPT2)
    parts = read_target(target, overrides={"n_layer": "3", "num_attention_heads": "4"}, seq_len=16)
    assert len(parts.model().transformer.h) == 3  # type: ignore[union-attr, arg-type]
    assert parts.example(2)["input_ids"].shape == (2, 16)
    longer = read_target(target, overrides={"max_position_embeddings": "128"}, seq_len=128)
    assert check_batch(longer, longer.model(), longer.example(1)) > 0
    assert parts.fingerprint != longer.fingerprint


@pytest.mark.parametrize(
    ("options", "what", "advice"),
    [
        ({"overrides": {"n_layers": "3"}}, "--set n_layers=3", "did you mean 'n_layer'?"),
        ({"overrides": {"n_layer": "many"}}, "should be an integer", "n_layer=2"),
        ({"overrides": {"text_config.size": "3"}}, "no such value", "there are no values"),
        ({"seq_len": 65}, "longer than the model's positions", "--seq-len 64"),
    ],
)
def test_bad_options(write: Any, options: Any, what: str, advice: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_target(write(GPT2), **options)
    assert what in caught.value.what
    assert advice in caught.value.try_


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"n_layer": 2}, "is not a Hugging Face configuration"),
        ({"model_type": "no-such-model"}, "not a configuration that the installed transformers can read"),
        ({**GPT2, "architectures": ["GPT7LMHeadModel"]}, "has no class GPT7LMHeadModel"),
        ({**GPT2, "architectures": ["ViTModel"]}, "no model with a loss is known"),
        ([1], "is not a Hugging Face configuration"),
    ],
)
def test_bad_configurations(write: Any, config: Any, what: str) -> None:
    with pytest.raises(TargetError) as caught:
        read_target(write(config))
    assert what in caught.value.what


def test_sizes_that_do_not_go_together_are_told_when_the_model_is_built(write: Any) -> None:
    parts = read_target(write({**GPT2, "n_embd": 33}))
    with pytest.raises(TargetError) as caught:
        parts.model()
    assert caught.value.what.startswith("GPT2LMHeadModel of")
    assert "divisible" in caught.value.found


def test_a_path_that_is_not_there_and_a_file_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="is not on this machine"):
        read_target("hf:gpt2")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TargetError, match="is not a JSON document"):
        read_target(f"hf:{tmp_path}")


def test_without_transformers_it_is_said_how_to_install_it(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(GPT2)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else find(name, *more)
    )
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(TargetError) as caught:
        read_target(target)
    assert "pip install" in caught.value.try_
