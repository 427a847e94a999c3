"""Random batches of the kind that a Hugging Face model takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from ..errors import OptionError, TargetError
from .parts import Batch

# Where a configuration does not bound the sequence, or bounds it far above what one asks for first.
_LONGEST_DEFAULT: Final = 4096
# Image side where a configuration names none: that of ImageNet training (He et al. 2015, section 3.4).
_IMAGE_SIDE: Final = 224
# Samples of audio where none are asked for: one second at the 16 kHz of wav2vec 2.0 (Baevski et al. 2020).
_AUDIO_SAMPLES: Final = 16000
# Letters of a transcript per second of speech in the random batches; any number below the frames would do.
_TRANSCRIPT: Final = 12


def sequence_length(config: Any, seq_len: int | None) -> int:
    """Return the tokens (or audio samples) of one sample: as asked, or the model's positions up to 4096.

    Raises: OptionError if it is longer than the positions that the model has.
    """
    text = getattr(config, "text_config", config)
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return seq_len or _LONGEST_DEFAULT
    # RoBERTa and its kin number positions from padding_idx + 1, so that two of 514 are never used
    # (transformers, create_position_ids_from_input_ids).
    usable = positions - 2 if positions % 64 == 2 else positions
    if seq_len is not None and seq_len > usable:
        raise OptionError(
            f"--seq-len {seq_len} is longer than the model's positions",
            found=f"{usable} positions in the configuration",
            try_=f"--seq-len {usable}, or --set max_position_embeddings={seq_len}",
        )
    return seq_len or min(usable, _LONGEST_DEFAULT)


def batch_maker(cls: Any, config: Any, length: int, seed: int) -> Callable[[int], Batch]:
    """Return `example(n)` for a model class: a dict of random inputs with its labels.

    Raises: TargetError if the class takes inputs that are not known here.
    """
    makers = {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "input_values": _audio,
        "input_features": _features,
    }
    inputs = makers.get(cls.main_input_name)
    labels = _label_maker(cls)
    if inputs is None or labels is None or _other_inputs(cls):
        raise TargetError(
            f"no example batch is known for {cls.__name__}",
            found=f"its forward takes {', '.join(list(inspect.signature(cls.forward).parameters)[1:7])}, ...",
            try_="write a job file: model() builds it, data(split) gives its samples",
        )

    def example(n: int) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        batch: dict[str, torch.Tensor] = inputs(config, n, length, draw)
        batch["labels"] = labels(config, batch, draw)
        if "next_sentence_label" in inspect.signature(cls.forward).parameters:
            batch["next_sentence_label"] = _integers((n,), 2, draw)
        return batch

    return example


def _other_inputs(cls: Any) -> bool:
    """Say whether the model reads several kinds of input at once (images and text, say)."""
    names = set(inspect.signature(cls.forward).parameters)
    return len(names & {"input_ids", "pixel_values", "input_values", "input_features"}) > 1


def _integers(shape: tuple[int, ...], high: int, draw: torch.Generator, *, low: int = 0) -> torch.Tensor:
    return torch.randint(low, max(high, low + 1), shape, generator=draw, device="cpu")


def _tokens(config: Any, n: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    text = getattr(config, "text_config", config)
    # The last id is drawn too: some models need an end-of-text token in every sample, none forbids one.
    pad = getattr(text, "pad_token_id", None)
    ids = _integers((n, length), text.vocab_size, draw)
    if isinstance(pad, int) and 0 <= pad < text.vocab_size:
        ids[ids == pad] = (pad + 1) % text.vocab_size
    return {"input_ids": ids}


def _pixels(config: Any, n: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", _IMAGE_SIDE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (n, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": torch.randn(shape, generator=draw, device="cpu")}


def _audio(config: Any, n: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn((n, _AUDIO_SAMPLES), generator=draw, device="cpu")}


def _features(config: Any, n: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    # Whisper's encoder halves the frames by its second convolution, hence twice the positions.
    frames = 2 * getattr(config, "max_source_positions", _LONGEST_DEFAULT // 2)
    bins = getattr(config, "num_mel_bins", 80)
    return {"input_features": torch.randn((n, bins, frames), generator=draw, device="cpu")}


Labels = Callable[[Any, dict[str, torch.Tensor], torch.Generator], torch.Tensor]


def _label_maker(cls: Any) -> Labels | None:
    """Return what makes the labels that the kind of head, told by the end of the class name, compares with."""
    name = cls.__name__
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "WithLMHeadModel")):
        return _same_as_input if cls.main_input_name == "input_ids" else None
    if name.endswith("ForConditionalGeneration"):
        return _same_as_input if cls.main_input_name == "input_ids" else _transcript
    if name.endswith(("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")):
        return _one_class
    if name.endswith("ForTokenClassification"):
        return _class_per_token
    return _transcript if name.endswith("ForCTC") else None


def _same_as_input(config: Any, batch: dict[str, torch.Tensor], draw: torch.Generator) -> torch.Tensor:
    return batch["input_ids"].clone()


def _transcript(config: Any, batch: dict[str, torch.Tensor], draw: torch.Generator) -> torch.Tensor:
    # From 1 up: 0 is the blank of CTC and the padding of most vocabularies.
    return _integers((_samples(batch), _TRANSCRIPT), config.vocab_size, draw, low=1)


def _one_class(config: Any, batch: dict[str, torch.Tensor], draw: torch.Generator) -> torch.Tensor:
    return _integers((_samples(batch),), config.num_labels, draw)


def _class_per_token(config: Any, batch: dict[str, torch.Tensor], draw: torch.Generator) -> torch.Tensor:
    return _integers(tuple(batch["input_ids"].shape), config.num_labels, draw)


def _samples(batch: dict[str, torch.Tensor]) -> int:
    return next(iter(batch.values())).shape[0]
